// The page: controls, what they change, and what is shown of it.
(() => {
  "use strict";

  const { betaDensity, returnsOf, walk } = globalThis.bmcUpdate;
  const { densities, overTime, shown } = globalThis.bmcCharts;
  const streams = globalThis.bmcStreams;

  // Sliders are logarithmic; a field beside each takes any number that is allowed.
  const SLIDERS = [
    { key: "alpha0", label: "α₀", hint: "prior weight of “uniform”", low: 0.1, high: 2000 },
    { key: "offset", label: "β₀ − α₀", hint: "what “greedy” has more", low: 0.001, high: 1000, zero: true },
    { key: "a0", label: "a₀", hint: "how firmly the returns’ variance is believed", low: 0.5, high: 5000 },
    { key: "b0", label: "b₀", hint: "b₀ / a₀ is that variance", low: 0.05, high: 50000 },
    { key: "rewardScale", label: "Rewards ×", hint: "the unit of reward", low: 0.001, high: 1000 },
  ];
  const STEPS = 400;

  const LESSONS = [
    {
      name: "Paper’s prior",
      set: {},
      text: `The prior of the recorded run. ε begins just below ½ and hardly moves at first, since the evidence
        of a transition is proportional to 1 − 2ε. Once it has left ½, it falls.`,
    },
    {
      name: "Small rewards",
      set: { rewardScale: 0.1 },
      text: `A tenth of the reward makes a tenth of the gap Δ, and a <em>hundredth</em> of the evidence, about
        (1 − 2ε) Δ² / 2σ². The model’s σ hardly follows: a₀ = b₀ = 500 says σ = 1 with the weight of a thousand
        returns. So ε stays, though the agent learns exactly as before.`,
    },
    {
      name: "Scale-free",
      set: { rewardScale: 0.1, scaleFree: true },
      text: `b₀ = a₀ σ̂² follows the variance of the returns, so that their unit cancels. Drag the reward scale:
        nothing changes. Whether ε falls at the right time is another question, and that is α₀’s.`,
    },
    {
      name: "α₀ = β₀",
      set: { offset: 0 },
      text: `At ε = ½ the return G = (1 − ε) G<sup>Q</sup> + ε G<sup>U</sup> lies midway between the two models, which
        explain it equally well whatever it is. No transition is evidence, and ε never learns. Hence the paper’s
        β₀ = α₀ + 0.01.`,
    },
    {
      name: "Strong prior",
      set: { factor: 10 },
      text: `Ten times the paper’s α₀. The prior is worth α₀ + β₀ transitions: the larger, the less each new one
        moves ε. With the same 0.01 between α₀ and β₀, ε also begins ten times closer to ½, where a transition
        is less evidence. The density is narrow: the prior is sure of itself.`,
    },
    {
      name: "Strong, but leaning",
      set: { factor: 10, ratio: 1.25 },
      text: `The same α₀, but β₀ = 1.25 α₀: the prior leans to “greedy”, and the first transitions are evidence
        already. α₀ + β₀ sets the pace; how far β₀ is from α₀ sets how long ε waits near ½.`,
    },
    {
      name: "Above ½",
      set: { ratio: 0.99 },
      text: `With β₀ below α₀ the two models change places, and ε <em>rises</em>. That ε never rises is
        Theorem 1, and it needs α₀ ≤ β₀. The library warns of such a prior.`,
    },
  ];

  const SUMMARY = [
    ["moment", "transition"],
    ["episode", "episode"],
    ["epsilon", "ε = α / (α + β)"],
    ["alpha", "α, weight of “uniform”"],
    ["beta", "β, weight of “greedy”"],
    ["gap", "gap Δ = G<sup>Q</sup> − G<sup>U</sup>"],
    ["deviation", "the model’s σ = √(b / a)"],
    ["ratio", "evidence of this transition"],
    ["logEvidence", "evidence so far"],
  ];

  const slider = ({ key, label, hint }) => `
    <div class="bmc-slider">
      <label for="bmc-${key}"><b>${label}</b> <small>${hint}</small></label>
      <input type="range" id="bmc-${key}" min="0" max="${STEPS}" step="1">
      <input type="number" id="bmc-${key}-number" step="any" aria-label="${label}, as a number">
      ${key === "offset" ? '<output class="bmc-begin" for="bmc-alpha0 bmc-offset"></output>' : ""}
    </div>`;

  const LAYOUT = `
    <div class="bmc-lessons" role="group" aria-label="Settings to try">
      ${LESSONS.map(({ name }, index) => `<button type="button" data-lesson="${index}">${name}</button>`).join("")}
    </div>
    <p class="bmc-text" role="status"></p>
    <div class="bmc-body">
      <figure class="bmc-epsilon">
        <figcaption>ε after each transition <span class="bmc-legend"><i class="bmc-key"></i> yours
          <i class="bmc-key bmc-key--paper"></i> the paper’s prior, rewards × 1</span></figcaption>
        <svg role="img" data-chart="epsilon"></svg>
        <label class="bmc-time" for="bmc-moment">Moment
          <input type="range" id="bmc-moment" min="0" step="1"></label>
      </figure>
      <form class="bmc-controls" aria-label="Prior and rewards">
        <div class="bmc-row">
          <label for="bmc-stream"><b>Recorded run</b></label>
          <select id="bmc-stream">
            ${Object.entries(streams).map(([key, { title }]) => `<option value="${key}">${title}</option>`).join("")}
          </select>
        </div>
        ${SLIDERS.map(slider).join("")}
        <label class="bmc-check"><input type="checkbox" id="bmc-scaleFree"> scale-free: b₀ = a₀ σ̂²</label>
        <label class="bmc-check"><input type="checkbox" id="bmc-maskTerminal"> terminal states are worth 0</label>
        <button type="button" id="bmc-reset">Reset to the paper’s prior</button>
      </form>
      <figure class="bmc-density">
        <figcaption>Beta density of ε at that moment</figcaption>
        <svg role="img" data-chart="density"></svg>
      </figure>
      <figure class="bmc-evidence">
        <figcaption>Evidence so far, Σ log e<sup>U</sup> − log e<sup>Q</sup></figcaption>
        <svg role="img" data-chart="evidence"></svg>
      </figure>
      <dl class="bmc-numbers" aria-label="Numbers at that moment">
        ${SUMMARY.map(([key, label]) => `<div><dt>${label}</dt><dd data-number="${key}"></dd></div>`).join("")}
      </dl>
    </div>`;

  const paperSettings = (stream) => ({
    stream,
    alpha0: streams[stream].prior.alpha0,
    // As the paper has it; the difference of the two floats is not quite that.
    offset: Number((streams[stream].prior.beta0 - streams[stream].prior.alpha0).toPrecision(6)),
    a0: streams[stream].prior.a0,
    b0: streams[stream].prior.b0,
    rewardScale: 1,
    scaleFree: false,
    maskTerminal: false,
  });

  function lessonSettings(stream, { factor = 1, ratio, ...set }) {
    const paper = paperSettings(stream);
    const alpha0 = paper.alpha0 * factor;
    const offset = ratio === undefined ? paper.offset : Number((alpha0 * (ratio - 1)).toPrecision(6));
    return { ...paper, alpha0, offset, ...set };
  }

  const priorOf = ({ stream, alpha0, offset, a0, b0, scaleFree }) => ({
    ...streams[stream].prior,
    alpha0,
    beta0: alpha0 + offset,
    a0,
    b0: scaleFree ? 0 : b0,
  });

  const traceOf = (settings) =>
    walk(
      returnsOf(streams[settings.stream], settings.rewardScale, settings.maskTerminal),
      priorOf(settings),
    );

  const allowed = (settings) =>
    settings.alpha0 + settings.offset > 0 &&
    ["alpha0", "a0", "b0", "rewardScale"].every((key) => settings[key] > 0 && settings[key] < 1e12);

  function atPosition({ low, high, zero }, position) {
    if (zero && position === 0) return 0;
    const exponent = Math.log10(low) + (position / STEPS) * Math.log10(high / low);
    return Number((10 ** exponent).toPrecision(3));
  }

  function positionOf({ low, high }, value) {
    if (value <= 0) return 0;
    return Math.round((STEPS * Math.log10(value / low)) / Math.log10(high / low));
  }

  // Episode that a transition belongs to, and how long ε took to halve, or null.
  const episodeOf = ({ episodeEnds }, moment) =>
    Math.min(episodeEnds.filter((end) => end + 1 < moment).length + 1, episodeEnds.length + 1);

  function halved(epsilon) {
    const when = epsilon.findIndex((value) => value <= epsilon[0] / 2);
    return when < 0 ? null : when;
  }

  function mount(root) {
    root.innerHTML = LAYOUT;
    const find = (selector) => root.querySelector(selector);
    let settings = paperSettings(Object.keys(streams)[0]);
    let lesson = 0;
    let moment = null;
    let paper = null;
    const papers = {};
    const charts = {};

    function compute() {
      root.trace = traceOf(settings);
      paper = papers[settings.stream] ??= traceOf(paperSettings(settings.stream));
      const last = root.trace.epsilon.length - 1;
      moment = Math.min(moment ?? Math.round(last * 0.7), last);
      find("#bmc-moment").max = last;
    }

    function showControls() {
      for (const given of SLIDERS) {
        const [range, number] = [find(`#bmc-${given.key}`), find(`#bmc-${given.key}-number`)];
        const value = settings[given.key];
        range.value = positionOf(given, value);
        range.setAttribute("aria-valuetext", shown(value));
        if (document.activeElement !== number) number.value = value;
        number.removeAttribute("aria-invalid");
      }
      for (const key of ["scaleFree", "maskTerminal"]) find(`#bmc-${key}`).checked = settings[key];
      for (const id of ["#bmc-b0", "#bmc-b0-number"]) find(id).disabled = settings.scaleFree;
      find("#bmc-stream").value = settings.stream;
      const beta0 = settings.alpha0 + settings.offset;
      const epsilon = shown(Number((settings.alpha0 / (settings.alpha0 + beta0)).toPrecision(5)));
      find(".bmc-begin").textContent = `β₀ = ${shown(beta0)}, and ε begins at ${epsilon}`;
    }

    function showLesson() {
      root.querySelectorAll("[data-lesson]").forEach((button, index) => {
        button.setAttribute("aria-pressed", index === lesson);
      });
      const { epsilon } = root.trace;
      const half = halved(epsilon);
      const fate = half === null ? "it has not halved" : `it halved after ${shown(half)} transitions`;
      const ends = [epsilon[0], epsilon[epsilon.length - 1]].map((value) => shown(Number(value.toPrecision(4))));
      const still = ends[0] === ends[1];
      const found = still ? `ε stayed at ${ends[0]}.` : `ε went from ${ends[0]} to ${ends[1]}; ${fate}.`;
      find(".bmc-text").innerHTML = lesson === null ? found : `${LESSONS[lesson].text} <b>${found}</b>`;
    }

    function draw() {
      const { trace } = root;
      const { episodeEnds } = streams[settings.stream];
      const most = Math.max(0.5, ...trace.epsilon) > 0.5 ? 1 : 0.5;
      charts.epsilon = overTime(find("[data-chart=epsilon]"), {
        own: trace.epsilon,
        paper: paper.epsilon,
        moment,
        height: 230,
        yRange: [0, most],
        ends: episodeEnds,
      });
      const both = [trace.logEvidence, paper.logEvidence];
      const low = Math.min(...both.map((sums) => Math.min(...sums)));
      const high = Math.max(...both.map((sums) => Math.max(...sums)));
      charts.evidence = overTime(find("[data-chart=evidence]"), {
        own: trace.logEvidence,
        paper: paper.logEvidence,
        moment,
        height: 190,
        yRange: [Math.min(low * 1.05, -0.01), Math.max(high * 1.05, 0)],
      });
      const density = ({ alpha, beta }) => betaDensity(alpha[moment], beta[moment]);
      const mean = trace.epsilon[moment];
      densities(find("[data-chart=density]"), { own: density(trace), paper: density(paper), mean, height: 190 });
      showNumbers(mean);
    }

    function showNumbers(mean) {
      const { trace } = root;
      find("#bmc-moment").value = moment;
      find("#bmc-moment").setAttribute("aria-valuetext", `transition ${moment}, ε = ${shown(mean)}`);
      const found = { moment, episode: episodeOf(streams[settings.stream], moment) };
      for (const [key] of SUMMARY) found[key] ??= trace[key][moment];
      for (const [key, value] of Object.entries(found)) {
        find(`[data-number=${key}]`).textContent = shown(Number(value.toPrecision(5)));
      }
      const described = `ε is ${shown(mean)} after ${moment} transitions`;
      for (const svg of root.querySelectorAll("svg")) svg.setAttribute("aria-label", described);
    }

    function change(changes, chosen = null) {
      settings = { ...settings, ...changes };
      lesson = chosen;
      compute();
      showControls();
      showLesson();
      draw();
    }

    function choose(index) {
      change(lessonSettings(settings.stream, LESSONS[index].set), index);
    }

    for (const given of SLIDERS) {
      const [range, number] = [find(`#bmc-${given.key}`), find(`#bmc-${given.key}-number`)];
      const offer = (value) => {
        if (allowed({ ...settings, [given.key]: value })) change({ [given.key]: value });
        else number.setAttribute("aria-invalid", "true");
      };
      range.addEventListener("input", () => offer(atPosition(given, range.valueAsNumber)));
      number.addEventListener("input", () => offer(number.valueAsNumber));
      number.addEventListener("blur", showControls);
    }
    for (const key of ["scaleFree", "maskTerminal"]) {
      find(`#bmc-${key}`).addEventListener("change", ({ target }) => change({ [key]: target.checked }));
    }
    find("#bmc-stream").addEventListener("change", ({ target }) => {
      moment = null;
      change(paperSettings(target.value), 0);
    });
    find("#bmc-moment").addEventListener("input", ({ target }) => {
      moment = target.valueAsNumber;
      draw();
    });
    root.querySelectorAll("[data-lesson]").forEach((button, index) => {
      button.addEventListener("click", () => choose(index));
    });
    find("#bmc-reset").addEventListener("click", () => choose(0));
    find(".bmc-controls").addEventListener("submit", (event) => event.preventDefault());
    for (const name of ["epsilon", "evidence"]) {
      const svg = find(`[data-chart=${name}]`);
      const point = (event) => {
        const at = Math.round(charts[name].toX(event.clientX - svg.getBoundingClientRect().left));
        moment = Math.max(0, Math.min(at, root.trace.epsilon.length - 1));
        draw();
      };
      svg.addEventListener("pointermove", point);
      svg.addEventListener("pointerdown", point);
    }
    choose(0);
    new ResizeObserver(draw).observe(root);
  }

  const root = document.getElementById("bmc-interactive");
  if (root && !root.trace) mount(root);
})();
