"""Several strategies side by side, one slice of the runs each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.utils import expand_right
from torch import Tensor, nn

from bmc_torchrl.precision import PerRun
from bmc_torchrl.strategies.base import EpsilonStrategy, Runs, has_time, per_run_buffer

__all__ = ["StackedEpsilon"]


class StackedEpsilon(EpsilonStrategy):
    """Strategies laid end to end along the leading run dimension.

    Strategy i, of batch shape ``[runs_i, *rest]``, takes the next ``runs_i`` runs: 22 strategies
    of 100 runs each are one module of batch shape ``[2200]``.

    Args:
        strategies (iterable of EpsilonStrategy): those strategies.

    Examples:
        >>> from bmc_torchrl import BMCEpsilon, ConstantEpsilon
        >>> bmc, constant = BMCEpsilon(batch_shape=[2]), ConstantEpsilon(0.1, batch_shape=[1])
        >>> StackedEpsilon([bmc, constant]).eps
        tensor([0.4975, 0.4975, 0.1000], dtype=torch.float64)
    """

    def __init__(self, strategies: Iterable[EpsilonStrategy]) -> None:
        strategies = list(strategies)
        rest = {strategy.batch_shape[1:] for strategy in strategies}
        if len(rest) != 1 or any(not strategy.batch_shape for strategy in strategies):
            shapes = [tuple(strategy.batch_shape) for strategy in strategies]
            raise ValueError(
                "StackedEpsilon needs strategies with a leading run dimension and equal further "
                f"dimensions, got batch shapes {shapes}: pass batch_shape=[runs] to each."
            )
        sizes = [strategy.batch_shape[0] for strategy in strategies]
        super().__init__((sum(sizes), *rest.pop()))
        self.strategies = nn.ModuleList(strategies)
        self.sizes = sizes
        keys = [key for strategy in strategies for key in strategy.in_keys]
        self.in_keys = list(dict.fromkeys(keys))
        self.state_key = next((s.state_key for s in strategies if s.state_key is not None), None)

    @property
    def needs_update(self) -> bool:
        """Whether one of the strategies does."""
        return any(strategy.needs_update for strategy, _ in self._slices())

    def _slices(self) -> Iterable[tuple[EpsilonStrategy, slice]]:
        start = 0
        for strategy, size in zip(self.strategies, self.sizes, strict=True):
            assert isinstance(strategy, EpsilonStrategy)
            yield strategy, slice(start, start + size)
            start += size

    def parts(self) -> Iterator[tuple[EpsilonStrategy, slice]]:
        """The strategies, those of nested stacks one by one, each with its runs."""
        for strategy, runs in self._slices():
            for part, own in strategy.parts():
                yield part, slice(runs.start + own.start, runs.start + own.stop)

    @property
    def eps(self) -> Tensor:
        """ε per run, ``[sum of runs, ...]``."""
        return self._together([strategy.eps for strategy, _ in self._slices()])

    def epsilon(self, tensordict: TensorDictBase) -> Tensor:
        """ε of each run, from the strategy it belongs to.

        Args:
            tensordict (TensorDictBase): what is acted on.

        Returns:
            ``[sum of runs, ...]`` or finer.
        """
        parts = [
            strategy.epsilon(tensordict.select(*_read_to_act(strategy))[runs])
            for strategy, runs in self._slices()
        ]
        dims = max(part.ndim for part in parts)
        rest = next(part.shape[1:] for part in parts if part.ndim == dims)
        return self._together([expand_right(part, (len(part), *rest)) for part in parts])

    def _together(self, parts: list[Tensor]) -> Tensor:
        if len({part.device for part in parts}) > 1:
            # A strategy without buffers is nowhere in particular: it follows the others.
            device = next(self.buffers()).device
            parts = [part.to(device) for part in parts]
        return torch.cat(parts)

    def read(self, transition: TensorDictBase, taken: Tensor | None) -> tuple[Any, ...]:
        """What every strategy reads of its own runs."""
        size = transition.batch_size
        if size[: len(size) - has_time(transition)][:1] != self.batch_shape[:1]:
            raise ValueError(
                f"A transition of batch size {tuple(size)} does not start with the "
                f"{self.batch_shape[0]} runs of the stacked strategies."
            )
        # Slicing costs as much per entry as learning does: only what strategies read is sliced.
        parts = transition.select(*self.in_keys, strict=False).split(self.sizes, 0)
        marks = [None] * len(parts) if taken is None else torch.split(taken, self.sizes)
        return tuple(
            strategy.read(part, mark)
            for (strategy, _), part, mark in zip(self._slices(), parts, marks, strict=True)
        )

    def learn(self, *columns: Any) -> None:
        """Let every strategy learn."""
        for (strategy, _), own in zip(self._slices(), columns, strict=True):
            strategy.learn(*own)

    def reset(self, *, strength: PerRun | None = None, runs: Runs | None = None) -> None:
        """Let every strategy unlearn what it knows of the chosen ones of its runs."""
        mask, given = self.chosen_runs(runs, self.eps), strength is not None
        wanted = self._each_run(strength, "strength") if strength is not None else self.eps
        for strategy, own in self._slices():
            strategy.reset(strength=wanted[own] if given else None, runs=mask[own])

    def forget(self, rate: PerRun, *, runs: Runs | None = None) -> None:
        """Let every strategy unlearn a share of what it knows of the chosen ones of its runs."""
        mask, share = self.chosen_runs(runs, self.eps), self._each_run(rate, "rate")
        for strategy, own in self._slices():
            strategy.forget(share[own], runs=mask[own])

    def _each_run(self, value: PerRun, name: str) -> Tensor:
        anything = per_run_buffer(value, self.batch_shape, name, torch.isfinite, "finite")
        return anything.expand(self.batch_shape)

    def count_skipped(
        self,
        transition: TensorDictBase,
        taken: Tensor | None,
        real: Tensor | None,
        runs: slice | None = None,
    ) -> None:
        """Let every strategy count what was left out of its own runs."""
        for strategy, own in self._slices():
            if runs is not None:
                own = slice(runs.start + own.start, runs.start + own.stop)
            strategy.count_skipped(transition, taken, real, own)

    def diagnostics(self) -> dict[str, Tensor]:
        """What the strategies say of themselves, NaN for the runs of those that do not say it."""
        said = [strategy.diagnostics() for strategy, _ in self._slices()]
        names = dict.fromkeys(name for found in said for name in found)
        unknown = [
            torch.full_like(s.eps, torch.nan, dtype=torch.float64) for s, _ in self._slices()
        ]
        return {
            name: torch.cat(
                [found.get(name, nan) for found, nan in zip(said, unknown, strict=True)]
            )
            for name in names
        }

    def step(self, frames: int) -> None:
        """Pass frames on to every strategy.

        Args:
            frames (int): how many.
        """
        for strategy, _ in self._slices():
            strategy.step(frames)


def _read_to_act(strategy: EpsilonStrategy) -> list[NestedKey]:
    return [] if strategy.state_key is None else [strategy.state_key]
