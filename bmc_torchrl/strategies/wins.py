"""ε as the share of non-greedy actions that beat what greedy promises; experimental."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from bmc_torchrl.functional import (
    beta_interval,
    exploratory_win,
    forgotten,
    mixture_return,
    positive_error,
)
from bmc_torchrl.precision import PerRun, shown
from bmc_torchrl.strategies.base import (
    SKIPPED,
    EpsilonStrategy,
    Runs,
    skipped_by_rule,
    skipped_metrics,
)
from bmc_torchrl.strategies.bmc import LARGEST_RETURN, put, scan
from bmc_torchrl.strategies.scalar import Number, Row, ScalarForm, ScalarRule
from bmc_torchrl.strategies.walks import can_walk, wins_walk

__all__ = ["ExplorationWinsEpsilon", "WinsPosterior", "WinsRule", "wins_step"]


class WinsPosterior(NamedTuple):
    """All that is remembered: Beta(α, β) of "exploration wins", the drift, and how much was seen.

    Args:
        alpha (Tensor): weight of wins and of the prior, ``[*batch]``.
        beta (Tensor): weight of losses, ``[*batch]``.
        drift (Tensor): positive part of the latest greedy TD error, ``[*batch]``.
        frames (Tensor): transitions so far, ``[*batch]``.

    Examples:
        >>> WinsPosterior(*torch.tensor([1000.0, 0.0, 0.0, 0.0])).alpha
        tensor(1000.)
    """

    alpha: Tensor
    beta: Tensor
    drift: Tensor
    frames: Tensor


def wins_step(
    posterior: WinsPosterior,
    corrects: Tensor,
    learns: Tensor,
    greedy_return: Tensor,
    uniform_return: Tensor,
    chosen: Tensor,
    promised: Tensor,
    greedily: Tensor,
) -> WinsPosterior:
    """One transition, with Q before learning.

    Args:
        posterior (WinsPosterior): that so far, ``[*batch]``.
        corrects (Tensor): bool ``[*batch]``, True where wins are corrected for drift.
        learns (Tensor): bool ``[*batch]``, True where all are finite and the policy's own.
        greedy_return (Tensor): ``[*batch]``.
        uniform_return (Tensor): ``[*batch]``.
        chosen (Tensor): value of the action taken, ``[*batch]``.
        promised (Tensor): value of the greedy action, ``[*batch]``.
        greedily (Tensor): bool ``[*batch]``, True where they are the same action.

    Returns:
        The posterior after the transition, unchanged where it does not learn.

    Examples:
        >>> start = WinsPosterior(*torch.tensor([3.0, 1.0, 0.0, 0.0]).double())
        >>> yes = torch.tensor(True)
        >>> wins_step(start, yes, yes, yes * 3.0, yes * 3.0, yes * 1.0, yes * 2.0, ~yes).alpha
        tensor(3.8000, dtype=torch.float64)
    """
    alpha, beta, drift, frames = posterior
    observed = mixture_return(greedy_return, uniform_return, alpha / (alpha + beta))
    won, lost = exploratory_win(observed, chosen, promised, drift)
    judged = learns & ~greedily
    followed = learns & greedily & corrects
    return WinsPosterior(
        torch.where(judged, alpha + won, alpha),
        torch.where(judged, beta + lost, beta),
        torch.where(followed, positive_error(observed, chosen), drift),
        frames + learns,
    )


class WinsRule(ScalarRule):
    """:func:`wins_step` for one run.

    The parameter is whether wins are corrected for drift; memory is ε, α, β, the drift, how many
    transitions there were, what :meth:`look` saw, and how many transitions were skipped.
    """

    @staticmethod
    def begin(parameters: Row, memory: Row, episode: Number) -> None:
        """ε of the posterior."""
        memory[0] = memory[1] / (memory[1] + memory[2])

    @staticmethod
    def look(memory: Row, chosen: Number, promised: Number, greedily: Number) -> None:
        """Keep all three for :meth:`learn`."""
        memory[5], memory[6], memory[7] = chosen, promised, 1.0 if greedily else 0.0

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
        """``exploratory_win`` of a non-greedy step, the drift of a greedy one."""
        chosen, promised = memory[5], memory[6]
        squares = greedy * greedy + uniform * uniform + chosen * chosen + promised * promised
        if not squares < LARGEST_RETURN**2:
            memory[8] += 1
            return
        memory[4] += 1
        observed = greedy + memory[1] / (memory[1] + memory[2]) * (uniform - greedy)
        if memory[7] > 0:
            if parameters[0] > 0:
                memory[3] = max(observed - chosen, 0.0)
        elif chosen < promised:
            corrected = observed - memory[3]
            surprise, lead = corrected - chosen, promised - chosen
            scale = max(abs(surprise), lead)
            squared = (surprise / scale) ** 2
            weight = squared / (squared + (lead / scale) ** 2)
            if corrected > promised:
                memory[1] += weight
            else:
                memory[2] += weight
            memory[0] = memory[1] / (memory[1] + memory[2])


class ExplorationWinsEpsilon(EpsilonStrategy):
    r"""Experimental: :math:`\varepsilon` is how often exploring beats what greedy promises.

    A Beta posterior, :math:`\varepsilon = \alpha / (\alpha + \beta)`, that begins with
    :math:`\alpha_0` = `strength` and :math:`\beta_0 = 0`, so at 1. Every non-greedy action is a
    trial: it wins if its one-step return exceeds :math:`\max Q(s, \cdot)`, and counts by its
    surprise; see
    :func:`~bmc_torchrl.functional.exploratory_win`. Greedy actions only say by how much values are
    rising, which wins are corrected for. ε may rise, its fall slows as ε falls, and no unit of
    reward matters: rewards times :math:`2^k` give the same ε bit for bit.

    What is known is a note from a search over variants, not a study: greedy-test AUC (0 is the
    random policy, 1 the optimum) on 19 small finite MDPs that nothing was chosen on was .58, that
    of the best single linear schedule .55 (difference of the uncorrected form +.03, 95 % [−.05,
    .13]) and of ε-BMC's best single prior .35; return while training .37, .17 and .26. In TorchRL's
    CartPole script its greedy return was 283, with linear annealing 208, with ε-BMC 190 (α₀ = 1)
    and 290 (α₀ = 10). It loses where steps cost and Q begins at 0 (every exploratory action
    "loses"), on FrozenLake 4×4, where a goal switches late, and to ε = 1 in deep sea and chains.

    Reads what :class:`~bmc_torchrl.OneStepReturns` writes with ``values=True``. What teaches
    nothing is counted by cause in :attr:`skipped`.

    Args:
        strength (float, sequence of float or Tensor, optional): :math:`\alpha_0`, how many wins the
            prior is worth, a number or one per run. Default: 1000.
        drift_corrected (bool, optional): whether wins that come from all values rising are taken
            back; without it ε stays high where values grow. Default: True.
        greedy_return_key (NestedKey, optional): where the return of acting greedily is found.
            Default: ``"greedy_return"``.
        uniform_return_key (NestedKey, optional): where the return of acting uniformly is found.
            Default: ``"uniform_return"``.
        chosen_value_key (NestedKey, optional): where Q(s, a) is found. Default: ``"chosen_value"``.
        promised_value_key (NestedKey, optional): where :math:`\max Q(s, \cdot)` is found.
            Default: ``"promised_value"``.
        greedily_key (NestedKey, optional): where it is found whether the action is the greedy one.
            Default: ``"acted_greedily"``.
        batch_shape (sequence of int, optional): shape of the runs; ``()`` pools all environments in
            one posterior. Default: ``()``.

    Examples:
        >>> ExplorationWinsEpsilon()
        ExplorationWinsEpsilon(eps=1, batch_shape=(), alpha=1000, beta=0)
    """

    def __init__(
        self,
        strength: PerRun = 1000.0,
        *,
        drift_corrected: bool = True,
        greedy_return_key: NestedKey = "greedy_return",
        uniform_return_key: NestedKey = "uniform_return",
        chosen_value_key: NestedKey = "chosen_value",
        promised_value_key: NestedKey = "promised_value",
        greedily_key: NestedKey = "acted_greedily",
        batch_shape: Sequence[int] = (),
    ) -> None:
        super().__init__(batch_shape)
        returns = (greedy_return_key, uniform_return_key)
        self.number_keys = (*returns, chosen_value_key, promised_value_key)
        self.greedily_key, self.drift_corrected = greedily_key, drift_corrected
        self.in_keys = [*self.number_keys, greedily_key]
        self.strength: Tensor
        self.alpha: Tensor
        self.beta: Tensor
        self.drift: Tensor
        self.frames: Tensor
        self.skipped_nonfinite: Tensor
        alpha = self.positive(strength, "strength").expand(self.batch_shape)
        for name in ("strength", "alpha"):
            self.register_buffer(name, alpha.clone())
        for name in ("beta", "drift", "frames"):
            self.register_buffer(name, torch.zeros_like(alpha))
        self.register_skipped(*SKIPPED)

    def _posterior(self) -> WinsPosterior:
        return WinsPosterior(self.alpha, self.beta, self.drift, self.frames)

    @property
    def eps(self) -> Tensor:
        """ε per run."""
        return self.alpha / (self.alpha + self.beta)

    @property
    def learned(self) -> Tensor:
        """How many frames have taught it, ``[*batch_shape]``."""
        return self.frames

    def learned_from(self, transition: TensorDictBase) -> Tensor | None:
        """The greedy return."""
        value: Tensor = transition.get(self.number_keys[0])
        return value

    def credible_interval(self, probability: float = 0.95) -> tuple[Tensor, Tensor]:
        """Bounds between which ε lies, with equal tails; both 1 before the first loss.

        Args:
            probability (float, optional): with which it does. Default: 0.95.

        Returns:
            Lower and upper bound, ``[*batch_shape]`` each.
        """
        known = self.beta > 0
        beta = torch.where(known, self.beta, 1.0)
        low, high = beta_interval(self.alpha, beta, probability)
        return torch.where(known, low, 1.0), torch.where(known, high, 1.0)

    def reset(self, *, strength: PerRun | None = None, runs: Runs | None = None) -> None:
        """Back to the prior, ε = 1; see :meth:`EpsilonStrategy.reset`."""
        prior = self.strength
        if strength is not None:
            prior = self.positive(strength, "strength", prior)
        self._unlearn(prior, self.chosen_runs(runs, self.alpha).double())

    def forget(self, rate: PerRun, *, runs: Runs | None = None) -> None:
        """Thin wins and losses; see :meth:`EpsilonStrategy.forget`."""
        self._unlearn(self.strength, self.forgetting_rate(rate, runs, self.alpha))

    def _unlearn(self, strength: Tensor, rate: Tensor) -> None:
        nothing = torch.zeros_like(self.alpha)
        for buffer, prior in zip(self._posterior(), (strength, *[nothing] * 3), strict=True):
            buffer.copy_(forgotten(buffer, prior, rate))

    def read(self, transition: TensorDictBase, taken: Tensor | None) -> tuple[Tensor, ...]:
        """Where to learn, both returns, both values and whether they are one, by steps."""
        numbers = [self.number(transition, key, self.alpha) for key in self.number_keys]
        greedily = self.entry(transition, self.greedily_key, self.alpha)
        if greedily.dtype != torch.bool:
            raise TypeError(f"{self.greedily_key!r} must be bool, got {greedily.dtype}.")
        first = self.number_keys[0]
        for key, value in zip(self.in_keys, (*numbers, greedily), strict=True):
            if value.shape != numbers[0].shape:
                raise ValueError(
                    f"{first!r} has shape {tuple(numbers[0].shape)} and {key!r} "
                    f"{tuple(value.shape)}: they must be equal."
                )
        columns = (self.mark_like(taken, numbers[0]), *numbers, greedily)
        return tuple(self.steps(transition, column) for column in columns)

    def learn(self, *columns: Tensor) -> None:
        """Judge the non-greedy steps, one after the other."""
        taken, *numbers, _ = columns
        squares = torch.stack([number.square() for number in numbers]).sum(0)
        learns = taken & (squares < LARGEST_RETURN**2)
        self.skipped_nonfinite.add_((taken ^ learns).sum(0))
        if learns.device.type == "cpu" and can_walk(learns):
            after = self._walked_in_one(learns, *columns[1:])
        else:
            after = self._walked(learns, *columns[1:])
        for buffer, value in zip(self._posterior(), after, strict=True):
            put(buffer, value)

    def _walked_in_one(self, learns: Tensor, *columns: Tensor) -> WinsPosterior:
        """Every step of ``[steps, *batch_shape]`` by :class:`WinsRule`, in one operator."""
        unseen = [torch.zeros_like(self.alpha)] * 4
        memory = torch.stack([self.eps, *self._posterior(), *unseen], -1).view(-1, 9)
        corrects = torch.full_like(memory[:, :1], self.drift_corrected)
        steps = (x.reshape(len(x), -1) for x in (learns, *columns))
        after = wins_walk(corrects, memory, *steps)[:, 1:5]
        return WinsPosterior(*(x.view(self.batch_shape) for x in after.unbind(-1)))

    def _walked(self, learns: Tensor, *columns: Tensor) -> WinsPosterior:
        """The same with tensors; one loop in the graph when compiled."""
        corrects = torch.full_like(self.alpha, self.drift_corrected, dtype=torch.bool)
        steps = (learns, *columns)
        if scan is not None and len(learns) > 1 and torch.compiler.is_compiling():

            def body(
                carry: tuple[Tensor, ...], step: tuple[Tensor, ...]
            ) -> tuple[tuple[Tensor, ...], Tensor]:
                after = wins_step(WinsPosterior(*carry), corrects, *step)
                return tuple(after), after.alpha.clone()

            carry, _ = scan(body, tuple(x.clone() for x in self._posterior()), steps)
            return WinsPosterior(*carry)
        after = self._posterior()
        for step in zip(*(x.unbind(0) for x in steps), strict=True):
            after = wins_step(after, corrects, *step)
        return after

    def diagnostics(self) -> dict[str, Tensor]:
        """The posterior of each run, and what was skipped."""
        causes = skipped_metrics(*(count.double() for count in self.skipped.values()))
        return _named(self.alpha, self.beta, self.drift) | causes

    def scalars(self) -> ScalarForm:
        """Whether drift is corrected, ε, the posterior and what was skipped."""
        return ScalarForm(
            WinsRule,
            parameters=(float(self.drift_corrected),),
            memory=(self.eps, *self._posterior(), 0.0, 0.0, 0.0, self.skipped_nonfinite),
        )

    def load_scalars(self, memory: Tensor, local: Tensor | None) -> None:
        """Take over the posterior and what was skipped."""
        columns = memory.unbind(-1)
        for buffer, column in zip(self._posterior(), columns[1:5], strict=True):
            buffer.copy_(column)
        self.skipped_nonfinite.copy_(columns[8])

    @staticmethod
    def scalar_diagnostics(memory: Tensor) -> dict[str, Tensor]:
        """What :meth:`diagnostics` would say, from the memory of :class:`WinsRule`.

        Args:
            memory (Tensor): ``[*batch, columns]``.

        Returns:
            ``[*batch]`` each.
        """
        _, alpha, beta, drift, _, _, _, _, nonfinite, *_ = memory.unbind(-1)
        return _named(alpha, beta, drift) | skipped_by_rule(nonfinite)

    def extra_repr(self) -> str:
        """ε and its posterior."""
        plain = "" if self.drift_corrected else ", drift_corrected=False"
        posterior = f"alpha={shown(self.alpha)}, beta={shown(self.beta)}"
        return f"{super().extra_repr()}, {posterior}{plain}"


def _named(alpha: Tensor, beta: Tensor, drift: Tensor) -> dict[str, Tensor]:
    return {
        "posterior/alpha": alpha,
        "posterior/beta": beta,
        "posterior/drift": drift,
        "posterior/strength": alpha + beta,
    }
