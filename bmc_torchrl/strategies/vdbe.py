"""Value-difference based exploration (Tokic 2010)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from bmc_torchrl.functional import forgotten, vdbe_epsilon
from bmc_torchrl.precision import PerRun, shown
from bmc_torchrl.strategies.base import (
    SKIPPED,
    EpsilonStrategy,
    Runs,
    gather_state,
    per_run_buffer,
    skipped_by_rule,
    skipped_metrics,
)
from bmc_torchrl.strategies.scalar import Number, Row, ScalarForm, ScalarRule
from bmc_torchrl.strategies.walks import can_walk, vdbe_walk

__all__ = ["VDBEEpsilon", "VDBERule"]


class VDBERule(ScalarRule):
    """``vdbe_epsilon`` for one run: parameters are σ and δ, `local` is ε of each state.

    Memory is the number of changes that were not finite.
    """

    @staticmethod
    def epsilon(memory: Row, local: Row, state: Number) -> Number:
        """ε of the state."""
        return local[state]

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
        """Move ε of the state; a change that is not finite teaches nothing."""
        if math.isfinite(change):
            sigma, delta = parameters[0], parameters[1]
            moved = delta * math.tanh(abs(change) / (2 * sigma))
            local[state] = moved + (1 - delta) * local[state]
        else:
            memory[0] += 1.0


class VDBEEpsilon(EpsilonStrategy):
    r"""One ε per state, following how much learning still changes the values there.

    :math:`\varepsilon(s) \leftarrow \delta f(|\Delta Q| / \sigma) + (1 - \delta)\varepsilon(s)`,
    where :math:`\Delta Q` is the change that learning made to Q(s, a) (``"value_change"``) and
    :math:`s` the state being left. What teaches nothing (padding, frames of other policies, changes
    that are not finite) is counted by cause in :attr:`skipped`.

    Args:
        num_states (int): how many discrete states; 1 makes one ε for all states, and needs no state
            key.
        sigma (float, sequence of float or Tensor): inverse sensitivity, a number or one per run.
        delta (float): step size, usually one over the number of actions.
        initial (float, optional): ε of a state never left. Default: 0.5.
        state_key (NestedKey, optional): where the state is found, an index or a one-hot vector.
            Default: ``"state"``.
        value_change_key (NestedKey, optional): where :math:`\Delta Q` is found.
            Default: ``"value_change"``.
        batch_shape (sequence of int, optional): shape of the runs. Default: ``()``.

    Examples:
        >>> VDBEEpsilon(num_states=3, sigma=1.0, delta=0.25)
        VDBEEpsilon(eps=0.5, batch_shape=(), num_states=3, sigma=1, delta=0.25)
    """

    def __init__(
        self,
        num_states: int,
        sigma: PerRun,
        delta: float,
        *,
        initial: float = 0.5,
        state_key: NestedKey = "state",
        value_change_key: NestedKey = "value_change",
        batch_shape: Sequence[int] = (),
    ) -> None:
        super().__init__(batch_shape)
        if num_states < 1:
            raise ValueError(f"num_states must be at least 1, got {num_states}.")
        if not 0 < delta <= 1:
            raise ValueError(f"delta must be in (0, 1], got {delta}.")
        if not 0 <= initial <= 1:
            raise ValueError(f"initial must be between 0 and 1, got {initial}.")
        self.num_states, self.delta, self.initial = num_states, delta, initial
        self.state_key = state_key if num_states > 1 else None
        self.value_change_key = value_change_key
        self.in_keys = [value_change_key] + ([state_key] if self.state_key else [])
        self.sigma: Tensor
        self.epsilons: Tensor
        self.register_buffer(
            "sigma", per_run_buffer(sigma, batch_shape, "sigma", lambda x: x > 0, "positive")
        )
        shape = (*self.batch_shape, num_states)
        self.register_buffer("epsilons", torch.full(shape, initial, dtype=torch.float64))
        self.skipped_nonfinite: Tensor
        self.register_skipped(*SKIPPED)

    @property
    def eps(self) -> Tensor:
        """ε per run, averaged over states."""
        return self.epsilons.mean(-1)

    def epsilon(self, tensordict: TensorDictBase) -> Tensor:
        """ε of each run's current state.

        Args:
            tensordict (TensorDictBase): with the state.

        Returns:
            ``[*batch_shape]`` or finer.
        """
        if self.state_key is None:
            return self.epsilons.squeeze(-1)
        return self._at_state(self.epsilons, tensordict)

    def reset(self, *, strength: PerRun | None = None, runs: Runs | None = None) -> None:
        """ε of every state back to `initial`; there is no `strength`."""
        self.forget(1.0, runs=runs)

    def forget(self, rate: PerRun, *, runs: Runs | None = None) -> None:
        """Move ε of every state towards `initial`, of which it is a weighted mean with the data."""
        share = self.forgetting_rate(rate, runs, self.epsilons).unsqueeze(-1)
        initial = torch.full_like(self.epsilons, self.initial)
        self.epsilons.copy_(forgotten(self.epsilons, initial, share.expand_as(initial)))

    def read(self, transition: TensorDictBase, taken: Tensor | None) -> tuple[Tensor, ...]:
        """Value changes, where to learn from them, and states, ``[steps, *batch_shape]`` each."""
        change = self.entry(transition, self.value_change_key, self.epsilons).double()
        if self.state_key is None:
            state = torch.zeros_like(change, dtype=torch.int64)
        else:
            state = self._state_left(transition, self.num_states, change)
        columns = (change, self.mark_like(taken, change), state)
        return tuple(self.steps(transition, column) for column in columns)

    def learned_from(self, transition: TensorDictBase) -> Tensor | None:
        """The value change."""
        value: Tensor = transition.get(self.value_change_key)
        return value

    def learn(self, *columns: Tensor) -> None:
        """Move ε of each state left towards what its value change says."""
        change, taken, state = columns
        learns = taken & change.isfinite()
        self.skipped_nonfinite.add_((taken ^ learns).sum(0))
        if can_walk(change):
            sigma = self.sigma.expand(self.batch_shape)
            parameters = torch.stack([sigma, torch.full_like(sigma, self.delta)], -1).view(-1, 2)
            epsilons = self.epsilons.reshape(-1, self.num_states)
            flat = (column.reshape(len(column), -1) for column in (change, learns, state))
            self.epsilons.copy_(vdbe_walk(parameters, epsilons, *flat).view_as(self.epsilons))
            return
        for by, where, at in zip(*(x.unbind(0) for x in (change, learns, state)), strict=True):
            old = gather_state(self.epsilons, at)
            new = vdbe_epsilon(old, by, self.sigma, self.delta)
            self.epsilons.scatter_(-1, at[..., None], torch.where(where, new, old)[..., None])

    def diagnostics(self) -> dict[str, Tensor]:
        """What was skipped."""
        return skipped_metrics(*(count.double() for count in self.skipped.values()))

    def scalars(self) -> ScalarForm:
        """σ and δ, ε of each state, and how many changes were not finite."""
        return ScalarForm(
            VDBERule,
            parameters=(self.sigma, self.delta),
            memory=(self.skipped_nonfinite,),
            local=self.epsilons,
        )

    def load_scalars(self, memory: Tensor, local: Tensor | None) -> None:
        """Take over ε of each state, and what was skipped."""
        assert local is not None
        self.epsilons.copy_(local)
        self.skipped_nonfinite.copy_(memory[:, 0])

    @staticmethod
    def scalar_diagnostics(memory: Tensor) -> dict[str, Tensor]:
        """What :meth:`diagnostics` would say, from the memory of :class:`VDBERule`.

        Args:
            memory (Tensor): ``[*batch, columns]``.

        Returns:
            ``[*batch]`` each.
        """
        return skipped_by_rule(memory[..., 0])

    def extra_repr(self) -> str:
        """ε and its formula's parameters."""
        formula = f"sigma={shown(self.sigma)}, delta={self.delta:.4g}"
        return f"{super().extra_repr()}, num_states={self.num_states}, {formula}"
