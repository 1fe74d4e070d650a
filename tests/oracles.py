"""ε-BMC for one run in scalar arithmetic, line by line as the paper prints it.

Shares no code with the library. The same lines run in Python floats (`FLOAT`) and in 50 digits
(`EXACT`). Printed formulas cancel (Eq. (14) subtracts two nearly equal moments), so `FLOAT` is only
as good as its conditioning; `EXACT` has digits to spare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mpmath import MPContext

_MP = MPContext()
_MP.dps = 50


class Arithmetic(NamedTuple):
    """A kind of number and the functions Algorithm 1 needs of it."""

    number: Callable[[float], Any]
    log: Callable[[Any], Any]
    exp: Callable[[Any], Any]
    expm1: Callable[[Any], Any]
    log1p: Callable[[Any], Any]
    lgamma: Callable[[Any], Any]
    pi: Any


FLOAT = Arithmetic(float, math.log, math.exp, math.expm1, math.log1p, math.lgamma, math.pi)
EXACT = Arithmetic(_MP.mpf, _MP.log, _MP.exp, _MP.expm1, _MP.log1p, _MP.loggamma, +_MP.pi)


def student_t_log_density(x: Any, mean: Any, precision: Any, dof: Any, ops: Arithmetic) -> Any:
    """Logarithm of St(x | μ, λ, ν), as in Bishop (2006), Eq. (2.159)."""
    normaliser = (
        ops.lgamma((dof + 1) / 2)
        - ops.lgamma(dof / 2)
        + (ops.log(precision) - ops.log(ops.pi * dof)) / 2
    )
    return normaliser - (dof + 1) / 2 * ops.log(1 + precision * (x - mean) ** 2 / dof)


def moment_match(alpha: Any, beta: Any, log_e_u: Any, log_e_q: Any, ops: Arithmetic) -> Any:
    """Eqs. (12)–(16) as printed; both evidences are first divided by the larger."""
    larger = max(log_e_u, log_e_q)
    e_u, e_q = ops.exp(log_e_u - larger), ops.exp(log_e_q - larger)
    n, evidence = alpha + beta, e_u * alpha + e_q * beta
    m = alpha / (n + 1) * (e_u * (alpha + 1) + e_q * beta) / evidence
    v = alpha / (n + 1) * (alpha + 1) / (n + 2) * (e_u * (alpha + 2) + e_q * beta) / evidence
    r = (m - v) / (v - m**2)
    return m * r, (1 - m) * r


def one_step(
    alpha: float, beta: float, gap: float, a: float, b: float, ops: Arithmetic
) -> tuple[Any, Any]:
    """α and β after the transition with greedy return `gap` and uniform return 0."""
    alpha, beta, gap, a, b = (ops.number(x) for x in (alpha, beta, gap, a, b))
    observed = gap * beta / (alpha + beta)
    log_e_q = student_t_log_density(observed, gap, a / b, 2 * a, ops)
    log_e_u = student_t_log_density(observed, 0 * gap, a / b, 2 * a, ops)
    return moment_match(alpha, beta, log_e_u, log_e_q, ops)


def strength_form(
    epsilon: Any, tau: Any, n: Any, log_ratio: Any, expm1: Callable[[Any], Any]
) -> tuple[Any, Any, Any]:
    """ε, τ = 1 − 2ε and n = α + β after docs/protocol.md §1, given ℓ = log e^Q − log e^U."""
    y = -expm1(-log_ratio)
    q = epsilon * (1 - epsilon) * y / (1 - epsilon * y)
    p = epsilon * (1 - y) / (1 - epsilon * y)
    denominator = (
        n * n * epsilon * (1 - epsilon)
        + n * (epsilon * (1 - p) + (1 - epsilon) * p)
        + p * (1 - p) * (n + 2)
    )
    n_next = n + n * q * ((n + 1) * tau + (n + 2) * q) / denominator
    return epsilon - q / (n + 1), tau + 2 * q / (n + 1), n_next


@dataclass
class Run:
    """One run of Algorithm 1: what it remembers, and its lines 5 and 8–15."""

    alpha: Any
    beta: Any
    ops: Arithmetic
    mu0: float = 0.0
    tau0: float = 1.0
    a0: float = 500.0
    b0: float = 500.0

    def __post_init__(self) -> None:
        """Convert the numbers and start with no observations."""
        for name in ("alpha", "beta", "mu0", "tau0", "a0", "b0"):
            setattr(self, name, self.ops.number(getattr(self, name)))
        self.count, self.mean, self.squares = 0, self.ops.number(0.0), self.ops.number(0.0)

    @property
    def epsilon(self) -> Any:
        """Line 5."""
        return self.alpha / (self.alpha + self.beta)

    def observe(self, x: Any) -> None:
        """Line 12: Welford's recurrence for the mean and the sum of squared deviations."""
        self.count += 1
        old_mean = self.mean
        self.mean = old_mean + (x - old_mean) / self.count
        self.squares = self.squares + (x - old_mean) * (x - self.mean)

    @property
    def variance(self) -> Any:
        """Sample variance with n − 1, zero at the first observation, as published."""
        return self.squares / (self.count - 1) if self.count > 1 else self.ops.number(0.0)

    def precision(self) -> tuple[Any, Any]:
        """Line 13, Eq. (9)."""
        t = self.ops.number(self.count)
        shift = self.tau0 / (self.tau0 + t) * (self.mean - self.mu0) ** 2
        return self.a0 + t / 2, self.b0 + t / 2 * (self.variance + shift)

    def update(self, reward: float, next_values: Sequence[float], gamma: float) -> None:
        """Lines 8–10 and 12–15; line 10 is the sum over actions, not its decomposition (5)."""
        number, epsilon = self.ops.number, self.epsilon
        values, r, discount = [number(v) for v in next_values], number(reward), number(gamma)
        greedy = r + discount * max(values)
        uniform = r + discount * sum(values) / len(values)
        best = values.index(max(values))
        policy = [
            epsilon / len(values) + (1 - epsilon if i == best else 0) for i in range(len(values))
        ]
        expected = r + discount * sum(p * v for p, v in zip(policy, values, strict=True))
        self.observe(expected)
        a, b = self.precision()
        log_e_q = student_t_log_density(expected, greedy, a / b, 2 * a, self.ops)
        log_e_u = student_t_log_density(expected, uniform, a / b, 2 * a, self.ops)
        self.alpha, self.beta = moment_match(self.alpha, self.beta, log_e_u, log_e_q, self.ops)
