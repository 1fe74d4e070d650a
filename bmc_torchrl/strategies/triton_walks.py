"""The walks of :mod:`bmc_torchrl.strategies.walks` on a GPU: a run per lane, time the loop inside.

The only file that imports triton, and imported by the first walk on a GPU alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["bmc_walk_on_gpu", "vdbe_walk_on_gpu"]

# One warp of 32 lanes, and as many runs: the thread that wrote a run's memory is the one that reads
# it at the next step, so that nothing has to be waited for.
LANES = 32
# Sums and products are rounded one by one, as on a CPU.
OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}
MEMORY = tl.constexpr(8)
LARGEST_SQUARE = tl.constexpr(1e200)


@triton.jit
def log1p_of(x):
    """log(1 + x) for x ≥ 0, with Kahan's correction for what 1 + x rounds away."""
    more = 1.0 + x
    kept = more - 1.0
    return tl.where(kept == 0.0, x, tl.log(more) * (x / tl.where(kept == 0.0, 1.0, kept)))


@triton.jit
def tanh_of_half(x):
    """tanh(x / 2) for x ≥ 0, with Kahan's correction for what 1 − e⁻ˣ cancels."""
    x = tl.minimum(x, 40.0)  # tanh(20) is 1
    power = tl.exp(-x)
    log_power = tl.where(power == 1.0, -1.0, tl.log(power))
    lost = tl.where(power == 1.0, x, (1.0 - power) * (x / -log_power))
    return lost / (2.0 - lost)


@triton.jit
def log_evidence_ratio_of(gap, alpha, beta, a, b):
    """``functional.student_t_log_evidence_ratio``."""
    total = alpha + beta
    smaller, lead = tl.minimum(alpha, beta) / total, (alpha - beta) / total
    squared = gap * gap
    ratio = log1p_of(tl.abs(lead) * squared / (2.0 * b + smaller * smaller * squared))
    return (a + 0.5) * tl.where(lead < 0.0, -ratio, ratio)


@triton.jit
def moments_matched(alpha, beta, ratio):
    """``functional.beta_moment_match``."""
    weaker = tl.exp(-tl.abs(ratio))
    e_u, e_q = tl.where(ratio < 0.0, weaker, 1.0), tl.where(ratio < 0.0, 1.0, weaker)
    u, g = alpha * e_u, beta * e_q
    evidence = u + g
    spread = (u + alpha * evidence) * (g + beta * evidence) + u * g * (1.0 + alpha + beta)
    c = alpha * beta * (e_q - e_u) / spread
    return alpha - u * (alpha + 1.0) * c, beta + g * (beta + 1.0) * c


@triton.jit
def learn_posterior(row, mu0, tau0, a0, b0, greedy, uniform, taken):
    """``BMCRule.learn`` of a run's row, in place: lines 12–15 of Algorithm 1.

    ``functional.mixture_return``, ``welford_update``, ``prior_rate`` and ``precision_posterior``,
    then the two functions above.
    """
    usable = greedy * greedy + uniform * uniform < LARGEST_SQUARE
    learns = taken & usable
    alpha, beta = tl.load(row + 1, learns, 1.0), tl.load(row + 2, learns, 1.0)
    observed = greedy + alpha / (alpha + beta) * (uniform - greedy)
    count = tl.load(row + 3, learns, 0.0) + 1.0
    mean = tl.load(row + 4, learns, 0.0)
    deviation = observed - mean
    step = deviation / count
    mean += step
    m2 = tl.load(row + 5, learns, 0.0) + deviation * (deviation - step)
    shift = tau0 / (tau0 + count) * (mean - mu0) * (mean - mu0)
    half = count / 2.0
    variance = m2 / tl.maximum(count - 1.0, 1.0)
    rate = tl.where(b0 > 0.0, b0, a0 * variance)
    known = rate > 0.0
    b = tl.where(known, rate + half * (variance + shift), 1.0)
    ratio = log_evidence_ratio_of(greedy - uniform, alpha, beta, a0 + half, b)
    ratio = tl.where(known, ratio, 0.0)
    alpha, beta = moments_matched(alpha, beta, ratio)
    tl.store(row, alpha / (alpha + beta), learns)
    tl.store(row + 1, alpha, learns)
    tl.store(row + 2, beta, learns)
    tl.store(row + 3, count, learns)
    tl.store(row + 4, mean, learns)
    tl.store(row + 5, m2, learns)
    skips = taken & ~usable
    tl.store(row + 7, tl.load(row + 7, skips, 0.0) + 1.0, skips)
    return tl.where(learns, ratio, 0.0)


@triton.jit
def hold_posteriors(memory, held, run, ends, num_states):
    """α and β of every state of the runs whose episodes end, to act with from now on."""
    for each in range(num_states):
        row = run * num_states + each
        for column in tl.static_range(2):
            weight = tl.load(memory + row * MEMORY + 1 + column, ends, 1.0)
            tl.store(held + row * 2 + column, weight, ends)


@triton.jit(do_not_specialize=["steps", "runs", "num_states"])
def walk_posteriors(
    parameters,
    memory,
    held,
    evidence,
    taken,
    greedy,
    uniform,
    state,
    done,
    steps,
    runs,
    num_states,
    HAS_STATE: tl.constexpr,  # noqa: N803
    HAS_DONE: tl.constexpr,  # noqa: N803
    LANES: tl.constexpr,  # noqa: N803
):
    """The loop of ``bmc_walk``, in place."""
    run = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    there = run < runs
    own = parameters + run * 4
    mu0, tau0 = tl.load(own, there, 0.0), tl.load(own + 1, there, 1.0)
    a0, b0 = tl.load(own + 2, there, 1.0), tl.load(own + 3, there, 1.0)
    row = memory + run * num_states * MEMORY
    total = tl.zeros([LANES], tl.float64)
    at = run
    for _ in range(steps):
        if HAS_STATE:
            row = memory + (run * num_states + tl.load(state + at, there, 0)) * MEMORY
        takes = tl.load(taken + at, there, 0) != 0
        q, u = tl.load(greedy + at, there, 0.0), tl.load(uniform + at, there, 0.0)
        ratio = learn_posterior(row, mu0, tau0, a0, b0, q, u, takes)
        tl.store(row + 6, ratio, there)
        total += ratio
        if HAS_DONE:
            ends = tl.load(done + at, there, 0) != 0
            if tl.max(ends.to(tl.int32), 0) > 0:
                hold_posteriors(memory, held, run, ends, num_states)
        at += runs
    tl.store(evidence + run, total, there)


@triton.jit(do_not_specialize=["steps", "runs", "num_states"])
def walk_states(
    parameters,
    epsilons,
    change,
    taken,
    state,
    steps,
    runs,
    num_states,
    LANES: tl.constexpr,  # noqa: N803
):
    """The loop of ``vdbe_walk``, in place: ``functional.vdbe_epsilon`` of the states left."""
    run = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    there = run < runs
    sigma = tl.load(parameters + run * 2, there, 1.0)
    delta = tl.load(parameters + run * 2 + 1, there, 1.0)
    at = run
    for _ in range(steps):
        size = tl.abs(tl.load(change + at, there, 0.0))
        learns = (tl.load(taken + at, there, 0) != 0) & (size < float("inf"))
        where = epsilons + run * num_states + tl.load(state + at, there, 0)
        epsilon = tl.load(where, learns, 0.0)
        moved = delta * tanh_of_half(tl.where(learns, size, 0.0) / sigma)
        tl.store(where, moved + (1.0 - delta) * epsilon, learns)
        at += runs


def bmc_walk_on_gpu(
    parameters: Tensor,
    memory: Tensor,
    held: Tensor,
    taken: Tensor,
    greedy: Tensor,
    uniform: Tensor,
    state: Tensor | None,
    done: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``bmc_walk`` with its arguments, on a GPU, or on a CPU in Triton's interpreter."""
    memory, held = (x.clone(memory_format=torch.contiguous_format) for x in (memory, held))
    evidence = torch.zeros_like(parameters[:, 0])
    none = taken
    columns = (taken, greedy, uniform, none if state is None else state)
    ends = none if done is None else done.bool()
    (steps, runs), num_states = taken.shape, memory.shape[1]
    with torch.cuda.device_of(memory):
        walk_posteriors[(triton.cdiv(runs, LANES),)](
            parameters.contiguous(),
            memory,
            held,
            evidence,
            *(column.contiguous() for column in (*columns, ends)),
            steps,
            runs,
            num_states,
            HAS_STATE=state is not None,
            HAS_DONE=done is not None,
            LANES=LANES,
            **OPTIONS,
        )
    return memory, held, evidence


def vdbe_walk_on_gpu(
    parameters: Tensor, epsilons: Tensor, change: Tensor, taken: Tensor, state: Tensor
) -> Tensor:
    """``vdbe_walk`` with its arguments, on a GPU, or on a CPU in Triton's interpreter."""
    epsilons = epsilons.clone(memory_format=torch.contiguous_format)
    (steps, runs), num_states = taken.shape, epsilons.shape[1]
    columns = (column.contiguous() for column in (change, taken, state))
    with torch.cuda.device_of(epsilons):
        walk_states[(triton.cdiv(runs, LANES),)](
            parameters.contiguous(),
            epsilons,
            *columns,
            steps,
            runs,
            num_states,
            LANES=LANES,
            **OPTIONS,
        )
    return epsilons
