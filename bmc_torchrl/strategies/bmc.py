"""ε-BMC: ε as the mean of a Beta posterior over "greedy is right" and "uniform is right"."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.utils import expand_as_right
from torch import Tensor, nn

from bmc_torchrl.functional import (
    Moments,
    beta_interval,
    beta_moment_match,
    beta_of_strength,
    forgotten,
    mixture_return,
    welford_update,
)
from bmc_torchrl.likelihoods import (
    GaussianLikelihood,
    Likelihood,
    NormalGammaPrior,
    StudentTLikelihood,
)
from bmc_torchrl.precision import PerRun, shown
from bmc_torchrl.strategies.base import (
    SKIPPED,
    EpsilonStrategy,
    Runs,
    gather_state,
    has_time,
    skipped_by_rule,
    skipped_metrics,
)
from bmc_torchrl.strategies.scalar import (
    NoScalarFormError,
    Number,
    Row,
    ScalarForm,
    ScalarRule,
)
from bmc_torchrl.strategies.walks import (
    bmc_walk,
    bmc_walk_in_place,
    can_walk,
    can_walk_in_place,
)

# What compiles a walk through time into one loop of the graph is not public. Without it, the walk
# is unrolled: as many copies of the step as there are steps.
scan: Callable[..., Any] | None
try:
    from torch._higher_order_ops.scan import scan
except ImportError:
    scan = None

# One call instead of six; not public either.
_foreach_copy: Callable[[list[Tensor], list[Tensor]], None] | None
_foreach_copy = getattr(torch, "_foreach_copy_", None)

__all__ = ["BMCEpsilon", "BMCPosterior", "BMCRule", "bmc_step", "put", "usable"]

LARGEST_RETURN = 1e100
"""Pairs of returns of a larger norm, infinite or NaN, are skipped."""


class BMCPosterior(NamedTuple):
    """All that ε-BMC remembers: Beta(α, β) of ε, and the moments of the returns.

    Args:
        alpha (Tensor): weight of "uniform", ``[*batch]``.
        beta (Tensor): weight of "greedy", ``[*batch]``.
        return_count (Tensor): how many returns there were, ``[*batch]``.
        return_mean (Tensor): their mean, ``[*batch]``.
        return_m2 (Tensor): sum of their squared deviations from it, ``[*batch]``.

    Examples:
        >>> BMCPosterior(*torch.tensor([1.0, 1.01, 0.0, 0.0, 0.0])).beta
        tensor(1.0100)
    """

    alpha: Tensor
    beta: Tensor
    return_count: Tensor
    return_mean: Tensor
    return_m2: Tensor


def usable(greedy_return: Tensor, uniform_return: Tensor) -> Tensor:
    """Where both returns are numbers whose squares can be summed forever.

    Args:
        greedy_return (Tensor): ``[*batch]``.
        uniform_return (Tensor): ``[*batch]``.

    Returns:
        bool ``[*batch]``.

    Examples:
        >>> usable(torch.tensor([1.0, torch.nan]), torch.tensor([0.5, 0.5]))
        tensor([ True, False])
    """
    squared = torch.addcmul(greedy_return.square(), uniform_return, uniform_return)
    return squared < LARGEST_RETURN**2


def bmc_step(
    posterior: BMCPosterior,
    greedy_return: Tensor,
    uniform_return: Tensor,
    learns: Tensor,
    likelihood: Likelihood,
) -> tuple[BMCPosterior, Tensor]:
    """Lines 12–15 of Algorithm 1 ([GSL19]): one transition.

    Args:
        posterior (BMCPosterior): that so far, ``[*batch]``.
        greedy_return (Tensor): ``[*batch]``.
        uniform_return (Tensor): ``[*batch]``.
        learns (Tensor): bool ``[*batch]``, True where the returns are :func:`usable` and the
            policy's own.
        likelihood (Likelihood): how returns are distributed.

    Returns:
        The posterior after the transition, unchanged where it does not learn; and the log evidence
        ratio, zero there.

    Examples:
        >>> start = BMCPosterior(*torch.tensor([1.0, 1.01, 0.0, 0.0, 0.0]).double())
        >>> learns = torch.tensor(True)
        >>> after, _ = bmc_step(start, learns * 3.0, learns * 1.0, learns, StudentTLikelihood())
        >>> after.alpha < start.alpha
        tensor(True)
    """
    alpha, beta = posterior.alpha, posterior.beta
    # Without a gap the evidence is equal, and equal evidence changes nothing.
    gap = torch.where(learns, greedy_return - uniform_return, 0.0)
    observed = mixture_return(greedy_return, uniform_return, alpha / (alpha + beta))
    moments = welford_update(Moments(*posterior[2:]), observed, learns)
    ratio = likelihood.log_evidence_ratio(gap, alpha, beta, moments)
    return BMCPosterior(*beta_moment_match(alpha, beta, ratio), *moments), ratio


def log_evidence_ratio_of(gap: Number, alpha: Number, beta: Number, a: Number, b: Number) -> Number:
    """``student_t_log_evidence_ratio`` of numbers."""
    total = alpha + beta
    smaller, lead = min(alpha, beta) / total, (alpha - beta) / total
    squared = gap * gap
    ratio = math.log1p(abs(lead) * squared / (2 * b + smaller * smaller * squared))
    return (a + 0.5) * math.copysign(ratio, lead)


def gaussian_ratio_of(gap: Number, alpha: Number, beta: Number, variance: Number) -> Number:
    """``gaussian_log_evidence_ratio`` of numbers."""
    return -(beta - alpha) / (alpha + beta) * (gap * gap) / (2 * variance)


def moments_matched(alpha: Number, beta: Number, ratio: Number) -> tuple[Number, Number]:
    """``beta_moment_match`` of numbers."""
    weaker = math.exp(-abs(ratio))
    e_u, e_q = (weaker, 1.0) if ratio < 0 else (1.0, weaker)
    u, g = alpha * e_u, beta * e_q
    evidence = u + g
    spread = (u + alpha * evidence) * (g + beta * evidence) + u * g * (1 + alpha + beta)
    c = alpha * beta * (e_q - e_u) / spread
    return alpha - u * (alpha + 1) * c, beta + g * (beta + 1) * c


class BMCRule(ScalarRule):
    """:func:`bmc_step` for one run.

    Parameters are μ₀, τ₀, a₀ and b₀ (or 0, see ``prior_rate``) of the Student-t likelihood. With
    a₀ = 0 returns are Gaussian, and b₀ is their variance, or 0 for the running one. Memory is ε, α,
    β, the number, mean and squared deviations of the returns, the log evidence ratios' sum, and how
    many transitions were skipped.
    """

    @staticmethod
    def begin(parameters: Row, memory: Row, episode: Number) -> None:
        """ε of the posterior."""
        memory[0] = memory[1] / (memory[1] + memory[2])

    @staticmethod
    def learn(
        parameters: Row,
        memory: Row,
        local: Row,
        state: Number,
        greedy: Number,
        uniform: Number,
        change: Number,
    ) -> None:
        """Lines 12–15 of Algorithm 1; returns that are not :func:`usable` are skipped."""
        if not greedy * greedy + uniform * uniform < LARGEST_RETURN**2:
            memory[7] += 1
            return
        mu0, tau0, a0, b0 = parameters[0], parameters[1], parameters[2], parameters[3]
        alpha, beta = memory[1], memory[2]
        observed = greedy + alpha / (alpha + beta) * (uniform - greedy)
        count = memory[3] + 1
        deviation = observed - memory[4]
        step = deviation / count
        mean = memory[4] + step
        m2 = memory[5] + deviation * (deviation - step)
        shift = tau0 / (tau0 + count) * (mean - mu0) ** 2
        variance = m2 / max(count - 1, 1.0)
        if b0 == 0:
            b0 = (a0 if a0 > 0 else 1.0) * variance
        ratio, gap = 0.0, greedy - uniform
        if b0 > 0 and a0 > 0:
            a, b = a0 + count / 2, b0 + count / 2 * (variance + shift)
            ratio = log_evidence_ratio_of(gap, alpha, beta, a, b)
        elif b0 > 0:
            ratio = gaussian_ratio_of(gap, alpha, beta, b0)
        if b0 > 0:
            alpha, beta = moments_matched(alpha, beta, ratio)
        memory[0], memory[1], memory[2] = alpha / (alpha + beta), alpha, beta
        memory[3], memory[4], memory[5] = count, mean, m2
        memory[6] += ratio


class BMCEpsilon(EpsilonStrategy):
    r"""ε-BMC (Gimelfarb, Sanner & Lee 2019): :math:`\varepsilon = \alpha / (\alpha + \beta)`.

    Every transition is evidence for one of two models of the return: "greedy", which trusts the
    current action values, and "uniform", which trusts none of them. Reads the returns that
    :class:`~bmc_torchrl.OneStepReturns` writes. What teaches nothing (padding, frames of other
    policies, returns that are not finite) is counted by cause in :attr:`skipped`.

    Likelihood and prior are in the ``state_dict``: a checkpoint says what it is of, and loading it
    brings them back.

    Args:
        alpha0 (float, sequence of float or Tensor, optional): prior weight of "uniform", a number
            or one per run. Default: 1.
        beta0 (float, sequence of float or Tensor, optional): prior weight of "greedy", likewise. ε
            never rises if ``alpha0 <= beta0`` (Theorem 1), and never moves if they are equal.
            Default: 1.01.
        likelihood (Likelihood, optional): distribution of returns, of which the strategy keeps a
            copy with one value per run. Default: Student-t.
        prior (NormalGammaPrior, optional): the Student-t's prior of the returns' mean and
            precision, if no likelihood is given. Default: the paper's.
        num_states (int, optional): keep a posterior per discrete state, of the state being left.
            Default: one for all states.
        state_key (NestedKey, optional): where the state is found, an index or a one-hot vector.
            Default: ``"state"``.
        update (str, optional): ``"online"`` moves ε after every transition; ``"offline"`` holds it
            for an episode and then applies the episode's transitions in order.
            Default: ``"online"``.
        greedy_return_key (NestedKey, optional): where the return of acting greedily is found.
            Default: ``"greedy_return"``.
        uniform_return_key (NestedKey, optional): where the return of acting uniformly is found.
            Default: ``"uniform_return"``.
        batch_shape (sequence of int, optional): shape of the runs; ``()`` pools all environments in
            one posterior. Default: ``()``.

    Examples:
        >>> BMCEpsilon(alpha0=1.0, beta0=1.01)
        BMCEpsilon(
          eps=0.4975, batch_shape=(), alpha=1, beta=1.01
          (likelihood): StudentTLikelihood(mu0=0, tau0=1, a0=500, b0=500)
        )
    """

    def __init__(
        self,
        alpha0: PerRun = 1.0,
        beta0: PerRun = 1.01,
        *,
        likelihood: Likelihood | None = None,
        prior: NormalGammaPrior | None = None,
        num_states: int | None = None,
        state_key: NestedKey = "state",
        update: Literal["online", "offline"] = "online",
        greedy_return_key: NestedKey = "greedy_return",
        uniform_return_key: NestedKey = "uniform_return",
        batch_shape: Sequence[int] = (),
    ) -> None:
        super().__init__(batch_shape)
        if likelihood is not None and prior is not None:
            raise ValueError("Give a likelihood or a prior, not both: the prior is a Student-t's.")
        if num_states is not None and num_states < 1:
            raise ValueError(f"num_states must be at least 1 or None, got {num_states}.")
        if update not in ("online", "offline"):
            raise ValueError(f"update must be 'online' or 'offline', got {update!r}.")
        if likelihood is not None and not isinstance(likelihood, Likelihood):
            raise TypeError(
                f"likelihood must be a Likelihood such as StudentTLikelihood(), got {likelihood!r}."
            )
        likelihood = StudentTLikelihood(prior) if likelihood is None else likelihood
        self.likelihood = likelihood.over_runs(self.batch_shape)
        self.num_states = num_states
        self.state_key = state_key if num_states is not None else None
        self.offline = update == "offline"
        self.return_keys = (greedy_return_key, uniform_return_key)
        self.in_keys = [
            *self.return_keys,
            *([state_key] if num_states is not None else []),
            *([("next", "done")] if self.offline else []),
        ]
        self._register(alpha0, beta0)

    def _register(self, alpha0: PerRun, beta0: PerRun) -> None:
        alpha, beta = (
            self.positive(value, name) for name, value in (("alpha0", alpha0), ("beta0", beta0))
        )
        if bool((alpha >= beta).any()):
            warnings.warn(
                f"alpha0={alpha0} is not below beta0={beta0}: ε starts at ½ or above, where "
                "Theorem 1 does not hold. At ½ it never moves, above it may rise.",
                stacklevel=3,
            )
        states = () if self.num_states is None else (self.num_states,)
        shape = (*self.batch_shape, *states)
        self.alpha0: Tensor
        self.beta0: Tensor
        self.register_buffer("alpha0", alpha.expand(self.batch_shape).clone())
        self.register_buffer("beta0", beta.expand(self.batch_shape).clone())
        self.alpha: Tensor
        self.beta: Tensor
        self.pending_alpha: Tensor
        self.pending_beta: Tensor
        self.return_count: Tensor
        self.return_mean: Tensor
        self.return_m2: Tensor
        self.register_buffer("alpha", self._over_states(self.alpha0).clone())
        self.register_buffer("beta", self._over_states(self.beta0).clone())
        for name in ("return_count", "return_mean", "return_m2"):
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64))
        if self.offline:
            self.register_buffer("pending_alpha", self.alpha.clone())
            self.register_buffer("pending_beta", self.beta.clone())
        self.log_evidence: Tensor
        self.skipped_nonfinite: Tensor
        none = torch.zeros(self.batch_shape, dtype=torch.float64)
        self.register_buffer("log_evidence", none)
        self.register_skipped(*SKIPPED)

    def _over_states(self, value: Tensor) -> Tensor:
        """``[*batch_shape]``, spread over the states if there are any."""
        if self.num_states is None:
            return value
        return value.unsqueeze(-1).expand(*self.batch_shape, self.num_states)

    def reset(self, *, strength: PerRun | None = None, runs: Runs | None = None) -> None:
        """Back to the prior; see :meth:`EpsilonStrategy.reset`."""
        prior = self.alpha0, self.beta0
        if strength is not None:
            prior = beta_of_strength(*prior, self.positive(strength, "strength", self.alpha0))
        self._unlearn(prior, self.chosen_runs(runs, self.alpha0).double())

    def forget(self, rate: PerRun, *, runs: Runs | None = None) -> None:
        """Thin the evidence, that on ε and that on the returns' variance."""
        rate = self.forgetting_rate(rate, runs, self.alpha0)
        self._unlearn((self.alpha0, self.beta0), rate)

    def _unlearn(self, prior: tuple[Tensor, Tensor], rate: Tensor) -> None:
        own, nothing = self._over_states(rate), torch.zeros_like(self.alpha0)
        weights = [(self.alpha, self.beta)]
        if self.offline:
            weights.append((self.pending_alpha, self.pending_beta))
        for buffers in weights:
            for buffer, value in zip(buffers, prior, strict=True):
                buffer.copy_(forgotten(buffer, self._over_states(value), own))
        for buffer in (self.return_count, self.return_m2):
            buffer.copy_(forgotten(buffer, self._over_states(nothing), own))
        # A mean of fewer returns is the same mean, but not of none.
        self.return_mean.copy_(torch.where(self.return_count > 0, self.return_mean, 0.0))
        self.log_evidence.copy_(forgotten(self.log_evidence, nothing, rate))

    @property
    def waits(self) -> bool:
        """Whether updates are offline."""
        return self.offline

    @property
    def learned(self) -> Tensor:
        """How many frames have taught it, ``[*batch_shape]``."""
        return self.return_count if self.num_states is None else self.return_count.sum(-1)

    def learned_from(self, transition: TensorDictBase) -> Tensor | None:
        """The greedy return."""
        value: Tensor = transition.get(self.return_keys[0])
        return value

    @property
    def mean(self) -> Tensor:
        """Mean of the posterior over ε, which is ε."""
        return self.alpha / (self.alpha + self.beta)

    @property
    def variance(self) -> Tensor:
        """Variance of the posterior over ε."""
        strength = self.alpha + self.beta
        return self.mean * self.beta / strength / (strength + 1)

    @property
    def distribution(self) -> torch.distributions.Beta:
        """The posterior over ε."""
        return torch.distributions.Beta(self.alpha, self.beta)

    def credible_interval(self, probability: float = 0.95) -> tuple[Tensor, Tensor]:
        """Bounds between which ε lies, with equal tails.

        Args:
            probability (float, optional): with which it does. Default: 0.95.

        Returns:
            Lower and upper bound, each of the posterior's shape.
        """
        return beta_interval(self.alpha, self.beta, probability)

    @property
    def return_variance(self) -> Tensor:
        """Sample variance of the mixture returns seen so far."""
        return Moments(*self._posterior()[2:]).variance

    @property
    def eps(self) -> Tensor:
        """ε per run, averaged over states."""
        return self.mean if self.num_states is None else self.mean.mean(-1)

    def epsilon(self, tensordict: TensorDictBase) -> Tensor:
        """ε of each run, in its current state if there is a posterior per state.

        Args:
            tensordict (TensorDictBase): with the state, if there is one.

        Returns:
            ``[*batch_shape]`` or finer.
        """
        own = _own(self)
        alpha, beta = own["alpha"], own["beta"]
        if self.num_states is not None:
            alpha, beta = (self._at_state(x, tensordict) for x in (alpha, beta))
        return alpha / (alpha + beta)

    def diagnostics(self) -> dict[str, Tensor]:
        """The posterior of each run, averaged over states; the evidence; what was skipped."""
        alpha, beta, variance = self.alpha, self.beta, self.return_variance
        if self.num_states is not None:
            alpha, beta, variance = alpha.mean(-1), beta.mean(-1), variance.mean(-1)
        causes = skipped_metrics(*(count.double() for count in self.skipped.values()))
        return _named(alpha, beta, variance, self.log_evidence) | causes

    def scalars(self) -> ScalarForm:
        """Prior and posterior; online, with one posterior per run."""
        if self.offline or self.num_states is not None:
            raise NoScalarFormError(
                "Only ε-BMC with one posterior per run and online updates is a function of numbers."
            )
        prior = self.likelihood
        if not self._has_rule:
            raise NoScalarFormError(
                "Only ε-BMC with the package's own likelihoods is a function of numbers, not with "
                f"{type(prior).__name__}."
            )
        return ScalarForm(
            BMCRule,
            parameters=_rule_parameters(prior),
            memory=(self.eps, *self._remembered()),
        )

    def load_scalars(self, memory: Tensor, local: Tensor | None) -> None:
        """Take over the posterior, the evidence and what was skipped."""
        for buffer, column in zip(self._remembered(), memory.unbind(-1)[1:], strict=False):
            buffer.copy_(column)

    def _remembered(self) -> tuple[Tensor, ...]:
        own = _own(self)
        return (*self._posterior(), own["log_evidence"], own["skipped_nonfinite"])

    @staticmethod
    def scalar_diagnostics(memory: Tensor) -> dict[str, Tensor]:
        """What :meth:`diagnostics` would say, from the memory of :class:`BMCRule`.

        Args:
            memory (Tensor): ``[*batch, columns]``.

        Returns:
            ``[*batch]`` each.
        """
        _, alpha, beta, count, mean, m2, evidence, nonfinite, *_ = memory.unbind(-1)
        variance = Moments(count, mean, m2).variance
        return _named(alpha, beta, variance, evidence) | skipped_by_rule(nonfinite)

    def _posterior(self) -> BMCPosterior:
        own, ahead = _own(self), "pending_" if self.offline else ""
        weights = own[ahead + "alpha"], own[ahead + "beta"]
        return BMCPosterior(*weights, own["return_count"], own["return_mean"], own["return_m2"])

    def read(self, transition: TensorDictBase, taken: Tensor | None) -> tuple[Tensor, ...]:
        """Returns, where to learn from them, states and episode ends, as far as they are needed.

        Each is ``[*batch_shape]`` or ``[steps, *batch_shape]``. Further dimensions (a pooled
        posterior's environments, agents) are walked within each time step.
        """
        greedy, uniform = (self.number(transition, key, self.alpha) for key in self.return_keys)
        if greedy.shape != uniform.shape:
            raise ValueError(
                f"{self.return_keys[0]!r} has shape {tuple(greedy.shape)} and "
                f"{self.return_keys[1]!r} {tuple(uniform.shape)}: they must be equal."
            )
        columns = [greedy, uniform, self.mark_like(taken, greedy)]
        if self.num_states is not None:
            columns.append(self._state_left(transition, self.num_states, greedy))
        if self.offline:
            columns.append(expand_as_right(self._episode_end(transition), greedy))
        if greedy.shape == transition.batch_size == self.batch_shape and not has_time(transition):
            return tuple(columns)
        return tuple(self.steps(transition, column) for column in columns)

    def learn(self, *columns: Tensor) -> None:
        """Move the posterior, one step after the other."""
        greedy, uniform, taken, *more = columns
        one_step = greedy.ndim == len(self.batch_shape)
        waits = self.offline and not one_step
        if self._has_rule and not waits:
            own = (*_rule_parameters(self.likelihood), *self._remembered())
            if can_walk_in_place(greedy, own):
                self._walk_in_place(own, greedy, uniform, taken, *more)
                return
        student = type(self.likelihood) is StudentTLikelihood
        if student and not one_step and can_walk(greedy):
            self._walk_in_one(greedy, uniform, taken, *more)
            return
        learns = taken & usable(greedy, uniform)
        skipped = taken ^ learns
        if one_step:
            self.skipped_nonfinite.add_(skipped)
            self._step(learns, greedy, uniform, *more)
            return
        self.skipped_nonfinite.add_(skipped.sum(0))
        if not more:
            self._walk(learns, greedy, uniform)
            return
        for column in zip(*(c.unbind(0) for c in (learns, greedy, uniform, *more)), strict=True):
            self._step(*column)

    def _episode_end(self, transition: TensorDictBase) -> Tensor:
        if transition.batch_dims > len(self.batch_shape) + 1:
            raise ValueError(
                'update="offline" needs one posterior per environment: the transition has batch '
                f"size {tuple(transition.batch_size)} and the strategy {tuple(self.batch_shape)}."
            )
        return self._done(transition, self.alpha)

    @property
    def _has_rule(self) -> bool:
        return type(self.likelihood) in (StudentTLikelihood, GaussianLikelihood)

    def _walk_in_place(
        self,
        own: Sequence[Tensor],
        greedy: Tensor,
        uniform: Tensor,
        taken: Tensor,
        *state_and_done: Tensor,
    ) -> None:
        """By :class:`BMCRule`, one step or all of those that need not wait for an episode's end."""
        rest = list(state_and_done)
        state = None if self.num_states is None else rest.pop(0)
        bmc_walk_in_place(own, taken, greedy, uniform, state)
        if self.offline:
            self._release(rest.pop(0))

    def _walk_in_one(
        self, greedy: Tensor, uniform: Tensor, taken: Tensor, *state_and_done: Tensor
    ) -> None:
        """Every step of ``[steps, *batch_shape]`` by :class:`BMCRule`, in one operator."""
        prior, rest = self.likelihood, [x.reshape(len(x), -1) for x in state_and_done]
        assert isinstance(prior, StudentTLikelihood)
        posterior = self._posterior()
        zeros, states = torch.zeros_like(self.alpha), self.num_states or 1
        columns = [self.mean, *posterior, zeros, zeros]
        memory, held, evidence = bmc_walk(
            torch.stack([prior.mu0, prior.tau0, prior.a0, prior.b0], -1).view(-1, 4),
            torch.stack(columns, -1).view(-1, states, len(columns)),
            torch.stack([self.alpha, self.beta], -1).view(-1, states, 2),
            *(x.reshape(len(x), -1) for x in (taken, greedy, uniform)),
            None if self.num_states is None else rest.pop(0),
            rest.pop(0) if self.offline else None,
        )
        shape = self.alpha.shape
        _, *after, _, skipped = (x.reshape(shape) for x in memory.unbind(-1))
        self._write(posterior, BMCPosterior(*after), evidence.view(self.batch_shape))
        if self.num_states is not None:
            skipped = skipped.sum(-1)
        self.skipped_nonfinite.add_(skipped.long())
        if self.offline:
            for buffer, value in zip((self.alpha, self.beta), held.unbind(-1), strict=True):
                buffer.copy_(value.reshape(shape))

    def _walk(self, learns: Tensor, greedy: Tensor, uniform: Tensor) -> None:
        """Every step of ``[steps, *batch_shape]``; one loop in the graph when compiled."""
        posterior, steps = self._posterior(), len(greedy)
        if scan is not None and steps > 1 and torch.compiler.is_compiling():

            def body(
                carry: tuple[Tensor, ...], step: tuple[Tensor, ...]
            ) -> tuple[tuple[Tensor, ...], Tensor]:
                learns, greedy, uniform = step
                before = BMCPosterior(*carry)
                updated, ratio = bmc_step(before, greedy, uniform, learns, self.likelihood)
                return tuple(updated), ratio

            carry, ratios = scan(
                body, tuple(x.clone() for x in posterior), (learns, greedy, uniform)
            )
            result, evidence = BMCPosterior(*carry), ratios.sum(0)
        else:
            result, evidence = posterior, torch.zeros_like(self.log_evidence)
            for which, g, u in zip(*(x.unbind(0) for x in (learns, greedy, uniform)), strict=True):
                result, ratio = bmc_step(result, g, u, which, self.likelihood)
                evidence = evidence + ratio
        self._write(posterior, result, evidence)

    def _write(self, buffers: BMCPosterior, values: BMCPosterior, ratio: Tensor) -> None:
        into = [*buffers, self.log_evidence]
        what = [*values, self.log_evidence + ratio]
        # Inductor 2.13 miscompiles the fused copy.
        if _foreach_copy is None or torch.compiler.is_compiling():
            for buffer, value in zip(into, what, strict=True):
                put(buffer, value)
        else:
            _foreach_copy(into, what)

    def _step(
        self, learns: Tensor, greedy: Tensor, uniform: Tensor, *state_and_done: Tensor
    ) -> None:
        """One step with a posterior per state, or held until the episode ends."""
        buffers, rest = self._posterior(), list(state_and_done)
        if self.num_states is None:
            before, index = buffers, None
        else:
            index = rest.pop(0)
            before = BMCPosterior(*(gather_state(buffer, index) for buffer in buffers))
        after, ratio = bmc_step(before, greedy, uniform, learns, self.likelihood)
        if index is None:
            self._write(buffers, after, ratio)
        else:
            for buffer, value in zip(buffers, after, strict=True):
                buffer.scatter_(-1, index.unsqueeze(-1), value.unsqueeze(-1))
            put(self.log_evidence, self.log_evidence + ratio)
        if self.offline:
            self._release(rest.pop(0))

    def _release(self, done: Tensor) -> None:
        """Act with what was learned, where the episode ended."""
        if self.num_states is not None:
            done = done.unsqueeze(-1)
        put(self.alpha, torch.where(done, self.pending_alpha, self.alpha))
        put(self.beta, torch.where(done, self.pending_beta, self.beta))

    def extra_repr(self) -> str:
        """ε and its posterior."""
        states = "" if self.num_states is None else f", num_states={self.num_states}"
        offline = ", update='offline'" if self.offline else ""
        posterior = f"alpha={shown(self.alpha)}, beta={shown(self.beta)}"
        return f"{super().extra_repr()}, {posterior}{states}{offline}"


def _rule_parameters(likelihood: Likelihood) -> tuple[Tensor, ...]:
    """A likelihood's buffers as :class:`BMCRule` reads them."""
    if isinstance(likelihood, GaussianLikelihood):
        none = torch.zeros_like(likelihood.variance)
        return none, none, none, likelihood.variance
    own = _own(likelihood)
    return own["mu0"], own["tau0"], own["a0"], own["b0"]


def _own(module: nn.Module) -> dict[str, Tensor]:
    """A module's buffers; to ask it for one costs as much as to add two."""
    buffers: dict[str, Any] = module._buffers
    return buffers


def _named(alpha: Tensor, beta: Tensor, variance: Tensor, evidence: Tensor) -> dict[str, Tensor]:
    return {
        "posterior/alpha": alpha,
        "posterior/beta": beta,
        "posterior/return_variance": variance,
        "posterior/strength": alpha + beta,
        "posterior/log_evidence": evidence,
    }


def put(buffer: Tensor, value: Tensor) -> None:
    """Write to a buffer in place, in compiled graphs too.

    Args:
        buffer (Tensor): what is overwritten.
        value (Tensor): of the same shape.
    """
    if torch.compiler.is_compiling():
        # Of a float64 tensor without dimensions, a graph compiled by torch 2.13 loses what is
        # written in place; through a view with one it does not.
        buffer, value = buffer.view(-1), value.reshape(-1)
    buffer.copy_(value)
