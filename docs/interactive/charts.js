// Charts as SVG, drawn anew at the width there is. Colours and strokes are page.css's.
globalThis.bmcCharts = (() => {
  "use strict";

  const MARGIN = { top: 10, right: 14, bottom: 36, left: 52 };
  let clips = 0;

  function element(name, attributes, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  // Round numbers across [low, high], about `wanted` of them.
  function ticks(low, high, wanted) {
    const rough = (high - low) / wanted;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
    const first = Math.ceil(low / step - 1e-9);
    const last = Math.floor(high / step + 1e-9);
    return Array.from({ length: last - first + 1 }, (_, index) => (first + index) * step);
  }

  const superscript = (exponent) =>
    [...String(exponent)].map((digit) => (digit === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit])).join("");

  function shown(value) {
    const rounded = Number(value.toPrecision(6));
    const size = Math.abs(rounded);
    if (size !== 0 && (size < 1e-4 || size >= 1e6)) {
      const [digits, exponent] = rounded.toExponential().split("e");
      return `${digits.replace("-", "−")} · 10${superscript(Number(exponent))}`;
    }
    return rounded.toLocaleString("en", { maximumFractionDigits: 6 }).replace("-", "−");
  }

  // A line through the points (index, values[index]) with at most two of them per pixel: the
  // smallest and the largest.
  function seriesPath(values, x, y, width) {
    const stride = Math.max(1, Math.floor(values.length / width));
    let path = "";
    const add = (index) => {
      path += `${path ? "L" : "M"}${x(index).toFixed(1)},${y(values[index]).toFixed(2)}`;
    };
    for (let start = 0; start < values.length; start += stride) {
      let [low, high] = [start, start];
      for (let index = start; index < Math.min(start + stride, values.length); index++) {
        if (values[index] < values[low]) low = index;
        if (values[index] > values[high]) high = index;
      }
      add(Math.min(low, high));
      if (low !== high) add(Math.max(low, high));
    }
    return path;
  }

  function pointsPath(points, x, y) {
    return points
      .map(([a, b], index) => `${index ? "L" : "M"}${x(a).toFixed(1)},${y(b).toFixed(2)}`)
      .join("");
  }

  // Axes of a chart of this size. Returns what maps numbers to pixels, and a layer that is clipped
  // to the plot.
  function frame(svg, { height, xRange, yRange, xLabel, yTicks = true }) {
    const width = Math.max(svg.clientWidth, 200);
    const plot = { width: width - MARGIN.left - MARGIN.right };
    plot.height = height - MARGIN.top - MARGIN.bottom;
    const bottom = MARGIN.top + plot.height;
    const x = (value) => MARGIN.left + ((value - xRange[0]) / (xRange[1] - xRange[0])) * plot.width;
    const y = (value) => bottom - ((value - yRange[0]) / (yRange[1] - yRange[0])) * plot.height;
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    if (yTicks) {
      for (const tick of ticks(...yRange, height / 45)) {
        const at = y(tick);
        const grid = { class: "bmc-grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: at, y2: at };
        svg.append(element("line", grid));
        const label = { class: "bmc-tick", x: MARGIN.left - 7, y: at + 4, "text-anchor": "end" };
        svg.append(element("text", label, shown(tick)));
      }
    }
    for (const tick of ticks(...xRange, plot.width / 90)) {
      const label = { class: "bmc-tick", x: x(tick), y: bottom + 16, "text-anchor": "middle" };
      svg.append(element("text", label, shown(tick)));
    }
    const axis = { class: "bmc-axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: bottom, y2: bottom };
    svg.append(element("line", axis));
    const middle = MARGIN.left + plot.width / 2;
    const name = { class: "bmc-tick", x: middle, y: height - 3, "text-anchor": "middle" };
    svg.append(element("text", name, xLabel));
    const clip = element("clipPath", { id: `bmc-clip-${++clips}` });
    const inside = { x: MARGIN.left, y: MARGIN.top - 4, width: plot.width, height: plot.height + 4 };
    clip.append(element("rect", inside));
    const layer = element("g", { "clip-path": `url(#${clip.id})` });
    svg.append(clip, layer);
    const toX = (pixel) => xRange[0] + ((pixel - MARGIN.left) / plot.width) * (xRange[1] - xRange[0]);
    return { x, y, toX, bottom, layer, width: plot.width };
  }

  // A quantity over transitions: the reader's, the paper's behind it, and the chosen moment.
  function overTime(svg, { own, paper, moment, height, yRange, ends }) {
    const range = [0, own.length - 1];
    const chart = frame(svg, { height, xRange: range, yRange, xLabel: "transitions" });
    const { x, y, layer, bottom, width } = chart;
    if (ends) {
      const marks = ends.map((end) => `M${x(end + 1).toFixed(1)},${bottom}v-5`).join("");
      layer.append(element("path", { class: "bmc-ends", d: marks }));
    }
    layer.append(element("path", { class: "bmc-paper", d: seriesPath(paper, x, y, width) }));
    layer.append(element("path", { class: "bmc-own", d: seriesPath(own, x, y, width) }));
    const at = x(moment);
    svg.append(element("line", { class: "bmc-moment", x1: at, x2: at, y1: MARGIN.top, y2: bottom }));
    svg.append(element("circle", { class: "bmc-dot", cx: at, cy: y(own[moment]), r: 4.5 }));
    return chart;
  }

  // Densities on (0, 1), and the mean of the first.
  function densities(svg, { own, paper, mean, height }) {
    const across = Math.max(svg.clientWidth, 200);
    const at = Array.from({ length: across }, (_, pixel) => (pixel + 0.5) / across);
    const points = at.map((value) => [value, own(value)]);
    const top = 1.2 * Math.max(...points.map(([, density]) => density));
    const ranges = { xRange: [0, 1], yRange: [0, top], yTicks: false };
    const { x, y, layer, bottom } = frame(svg, { height, xLabel: "ε", ...ranges });
    const line = pointsPath(points, x, y);
    const behind = pointsPath(at.map((value) => [value, Math.min(paper(value), 2 * top)]), x, y);
    const closed = `${line}L${x(1)},${bottom}L${x(0)},${bottom}Z`;
    layer.append(element("path", { class: "bmc-area", d: closed }));
    layer.append(element("path", { class: "bmc-paper", d: behind }));
    layer.append(element("path", { class: "bmc-own", d: line }));
    const here = x(mean);
    layer.append(element("line", { class: "bmc-moment", x1: here, x2: here, y1: 0, y2: bottom }));
    const right = mean > 0.6;
    const beside = { class: "bmc-mean", x: here + (right ? -6 : 6), y: MARGIN.top + 12 };
    const text = `mean ${shown(Number(mean.toPrecision(3)))}`;
    svg.append(element("text", { ...beside, "text-anchor": right ? "end" : "start" }, text));
  }

  return { densities, overTime, shown };
})();
