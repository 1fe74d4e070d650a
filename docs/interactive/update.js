// The update of ε-BMC in plain numbers, as bmc_torchrl/functional.py, likelihoods.py and
// strategies/bmc.py have it; tests/docs/test_interactive.py holds it to them in a browser.
globalThis.bmcUpdate = (() => {
  "use strict";

  // log e^U − log e^Q of the mixture return: two Student-t densities (Eq. 10).
  function logEvidenceRatio(gap, alpha, beta, a, b) {
    const total = alpha + beta;
    const smaller = Math.min(alpha, beta) / total;
    const lead = (alpha - beta) / total;
    const squared = gap * gap;
    const ratio = Math.log1p((Math.abs(lead) * squared) / (2 * b + smaller * smaller * squared));
    return (a + 0.5) * (lead < 0 ? -ratio : ratio);
  }

  // The Beta with the mean and variance of the mixture that one observation leaves (Eqs. 12–16).
  function betaMomentMatch(alpha, beta, ratio) {
    const uniformEvidence = Math.exp(Math.min(ratio, 0));
    const greedyEvidence = Math.exp(Math.min(-ratio, 0));
    const u = alpha * uniformEvidence;
    const g = beta * greedyEvidence;
    const evidence = u + g;
    const spread = (u + alpha * evidence) * (g + beta * evidence) + u * g * (1 + alpha + beta);
    const c = (alpha * beta * (greedyEvidence - uniformEvidence)) / spread;
    return [alpha - u * (alpha + 1) * c, beta + g * (beta + 1) * c];
  }

  // Both returns of every transition in the unit that the reader chose. A masked terminal state
  // has no value, so that both returns are the reward.
  function returnsOf(stream, rewardScale, maskTerminal) {
    const inUnit = (stored) => (stored / stream.perUnit) * rewardScale;
    const greedy = Float64Array.from(stream.greedyReturns, inUnit);
    const uniform = Float64Array.from(stream.uniformReturns, inUnit);
    if (maskTerminal) {
      stream.terminalRewards.forEach((reward, episode) => {
        const end = stream.episodeEnds[episode];
        if (reward !== null) greedy[end] = uniform[end] = inUnit(reward);
      });
    }
    return { greedy, uniform };
  }

  // α, β, ε and the evidence after every transition; index 0 is the prior. The prior is
  // {alpha0, beta0, mu0, tau0, a0, b0}, where b0 = 0 follows the returns' running variance.
  function walk({ greedy, uniform }, prior) {
    const columns = ["alpha", "beta", "epsilon", "gap", "deviation", "ratio", "logEvidence"];
    const size = greedy.length + 1;
    const trace = Object.fromEntries(columns.map((name) => [name, new Float64Array(size)]));
    let { alpha0: alpha, beta0: beta } = prior;
    let [count, mean, m2, logEvidence] = [0, 0, 0, 0];
    trace.alpha[0] = alpha;
    trace.beta[0] = beta;
    trace.epsilon[0] = alpha / (alpha + beta);
    trace.deviation[0] = Math.sqrt(prior.b0 / prior.a0);
    for (let step = 1; step < size; step++) {
      const [greedyReturn, uniformReturn] = [greedy[step - 1], uniform[step - 1]];
      const gap = greedyReturn - uniformReturn;
      const observed = greedyReturn + (alpha / (alpha + beta)) * (uniformReturn - greedyReturn);
      count += 1;
      const deviation = observed - mean;
      mean += deviation / count;
      m2 += deviation * (observed - mean);
      const variance = m2 / Math.max(count - 1, 1);
      const shift = (prior.tau0 / (prior.tau0 + count)) * (mean - prior.mu0) ** 2;
      const b0 = prior.b0 > 0 ? prior.b0 : prior.a0 * variance;
      const a = prior.a0 + count / 2;
      const b = b0 + (count / 2) * (variance + shift);
      const ratio = b0 > 0 ? logEvidenceRatio(gap, alpha, beta, a, b) : 0;
      [alpha, beta] = betaMomentMatch(alpha, beta, ratio);
      logEvidence += ratio;
      trace.alpha[step] = alpha;
      trace.beta[step] = beta;
      trace.epsilon[step] = alpha / (alpha + beta);
      trace.gap[step] = gap;
      trace.deviation[step] = Math.sqrt(b / a);
      trace.ratio[step] = ratio;
      trace.logEvidence[step] = logEvidence;
    }
    return trace;
  }

  // Stirling's series, after shifting x to where it is exact to the last digits.
  function logGamma(x) {
    let shifted = 0;
    for (; x < 15; x++) shifted -= Math.log(x);
    const square = 1 / (x * x);
    const series = (1 / 12 - square * (1 / 360 - square * (1 / 1260 - square / 1680))) / x;
    return shifted + (x - 0.5) * Math.log(x) - x + Math.log(2 * Math.PI) / 2 + series;
  }

  // The density of Beta(alpha, beta), a function on (0, 1).
  function betaDensity(alpha, beta) {
    const scale = logGamma(alpha + beta) - logGamma(alpha) - logGamma(beta);
    return (x) => Math.exp(scale + (alpha - 1) * Math.log(x) + (beta - 1) * Math.log1p(-x));
  }

  return { betaDensity, returnsOf, walk };
})();
