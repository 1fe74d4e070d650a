"""What ε other strategies would have shown, had they been told of the same transitions.

That is a counterfactual: with another ε other actions would have been taken, and other transitions
seen.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor, nn

from bmc_torchrl.strategies.base import PADDING_KEYS, EpsilonStrategy, taken_with
from bmc_torchrl.strategies.stacked import StackedEpsilon

__all__ = ["ACTING", "PREFIX", "StrategyBank", "diagnosed", "what_if"]

PREFIX, ACTING = "whatif/epsilon/", "whatif/acting"
"""Metrics: ε by label, and ε of the strategy that acts at the same moment."""


class StrategyBank(nn.Module):
    """Strategies that learn from the same transitions and act in none.

    Those that differ in their numbers alone, such as ε-BMC with several priors, are one batch,
    whose update costs what one does.

    Args:
        strategies (mapping of str to EpsilonStrategy): by label, each with ``batch_shape=()``.
        batch_shape (sequence of int, optional): that of the strategy that acts, ``()`` or
            ``[runs]``: each of the bank then has as many. Default: ``()``.

    Examples:
        >>> from bmc_torchrl import BMCEpsilon, ConstantEpsilon
        >>> priors = {f"α₀ = {alpha0}": BMCEpsilon(alpha0, 1.01 * alpha0) for alpha0 in (1, 10)}
        >>> bank = StrategyBank({**priors, "ε = 0.1": ConstantEpsilon(0.1)})
        >>> data = {"greedy_return": torch.ones(500), "uniform_return": torch.zeros(500)}
        >>> bank.update(TensorDict(data, [500]))
        >>> {label: round(float(epsilon), 3) for label, epsilon in bank.epsilons().items()}
        {'α₀ = 1': 0.002, 'α₀ = 10': 0.083, 'ε = 0.1': 0.1}
    """

    MOST_WAITING = 64
    """How many steps :meth:`tell` keeps before they are learned from."""

    def __init__(
        self, strategies: Mapping[str, EpsilonStrategy], batch_shape: Sequence[int] = ()
    ) -> None:
        super().__init__()
        if not strategies:
            raise ValueError("strategies must name at least one, such as {'bmc': BMCEpsilon()}.")
        if len(batch_shape) > 1:
            raise ValueError(f"batch_shape must be () or [runs], got {list(batch_shape)}.")
        for label, strategy in strategies.items():
            if strategy.batch_shape:
                raise ValueError(
                    f"{label!r} has batch_shape={list(strategy.batch_shape)}: build it without, "
                    "the bank makes one of it for each run."
                )
        self.batch_shape = torch.Size(batch_shape)
        kinds: dict[Any, list[str]] = {}
        for label, strategy in strategies.items():
            kinds.setdefault(_kind(strategy), []).append(label)
        self.order = [label for labels in kinds.values() for label in labels]
        self.labels = list(strategies)
        runs = self.batch_shape.numel()
        self.stack = StackedEpsilon(
            _side_by_side([strategies[label] for label in labels], runs)
            for labels in kinds.values()
        )
        states = (part.state_key for part, _ in self.stack.parts())
        self.state_keys = [key for key in dict.fromkeys(states) if key is not None]
        self._waiting: list[TensorDictBase] = []
        self.register_state_dict_pre_hook(_settle_first)  # type: ignore[no-untyped-call]

    @property
    def in_keys(self) -> list[NestedKey]:
        """What :meth:`update` reads."""
        return self.stack.in_keys

    def epsilons(self) -> dict[str, Tensor]:
        """ε that each would show now, by label, ``[*batch_shape]``."""
        self.settle()
        rows = self.stack.eps.reshape(len(self.order), *self.batch_shape)
        found = dict(zip(self.order, rows, strict=True))
        return {label: found[label] for label in self.labels}

    def diagnostics(self, acting: EpsilonStrategy) -> dict[str, Tensor]:
        """The same by the names of metrics, ``whatif/epsilon/<label>``.

        Args:
            acting (EpsilonStrategy): the strategy that acts, whose ε is ``whatif/acting``.

        Returns:
            ``[*batch_shape]`` each.
        """
        found = {f"{PREFIX}{label}": value for label, value in self.epsilons().items()}
        return {ACTING: acting.eps, **found}

    def update(
        self,
        transition: TensorDictBase,
        taken: Tensor | None = None,
        *,
        mask_keys: Sequence[NestedKey] = PADDING_KEYS,
    ) -> None:
        """Let all learn from transitions; see :meth:`EpsilonStrategy.update`.

        Args:
            transition (TensorDictBase): ``[*batch_shape]``, or with more dimensions such as time.
            taken (Tensor, optional): where the policy took the action. Default: everywhere.
            mask_keys (sequence of NestedKey, optional): where masks of real steps are.
                Default: where TorchRL's collectors and ``split_trajectories`` have them.
        """
        number, size = len(self.order), transition.batch_size
        own = transition.select(*self.in_keys, *mask_keys, strict=False)
        wide = own.expand(number, *size)
        marks = None if taken is None else taken.expand(number, *taken.shape)
        if self.batch_shape:
            wide = wide.reshape(number * size[0], *size[1:])
            marks = None if marks is None else marks.flatten(0, 1)
        if "time" in transition.names:
            names = transition.names
            wide.names = names if self.batch_shape else [None, *names]
        self.stack.update(wide, marks, mask_keys=mask_keys)

    def tell(self, transition: TensorDictBase) -> None:
        """Let all learn from a step, when ε is asked for at the latest.

        Several steps cost what one does. In a graph, where nothing can wait, it is :meth:`update`.

        Args:
            transition (TensorDictBase): as :meth:`update` has it, without a dimension of time; it
                is copied.
        """
        if torch.compiler.is_compiling():
            return self.update(transition)
        if self._waiting and set(self._waiting[-1].keys()) != set(transition.keys()):
            self.settle()
        self._waiting.append(transition.clone())
        if len(self._waiting) == self.MOST_WAITING:
            self.settle()
        return None

    @torch.no_grad()
    def settle(self) -> None:
        """Let all learn from the steps that wait, as they must before a graph updates them."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            # One ε learns of all environments one after the other, step by step.
            pooled = not self.batch_shape and waiting[0].batch_dims == 1
            self.update(torch.cat(waiting) if pooled else torch.stack(waiting, -1))

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        """Go on from there; what has not been learned by now is not."""
        self._waiting = []
        return super().load_state_dict(*args, **options)


def _settle_first(bank: StrategyBank, *_: Any) -> None:
    bank.settle()


def diagnosed(acting: EpsilonStrategy, bank: StrategyBank | None) -> dict[str, Tensor]:
    """What a strategy says of itself, and what the others of a bank would.

    Args:
        acting (EpsilonStrategy): the strategy that acts.
        bank (StrategyBank, optional): the others.

    Returns:
        ``[*batch_shape]`` each, by the names of metrics.
    """
    return acting.diagnostics() | ({} if bank is None else bank.diagnostics(acting))


def what_if(
    transitions: TensorDictBase,
    strategies: Mapping[str, EpsilonStrategy],
    *,
    every: int = 1,
    batch_shape: Sequence[int] = (),
    epsilon_key: NestedKey = "epsilon",
) -> TensorDict:
    """The ε that strategies would have shown over recorded transitions.

    This is counterfactual: none of them acted, and with another ε the transitions would have been
    others.

    Args:
        transitions (TensorDictBase): what ``OneStepReturns`` wrote to, ``[*batch, time]``.
        strategies (mapping of str to EpsilonStrategy): by label, each with ``batch_shape=()``; they
            are left as they are.
        every (int, optional): how many steps of time lie between two rows. Default: 1.
        batch_shape (sequence of int, optional): ``()`` for one ε over all environments, ``[runs]``
            for one each. Default: ``()``.
        epsilon_key (NestedKey, optional): where the ε is that actions were taken with, if anywhere;
            what was taken with zero teaches nothing. Default: ``"epsilon"``.

    Returns:
        ``[rows]`` with the columns ``"step"`` and, by label, ε after so many steps of time,
        ``[rows, *batch_shape]``; the first row is before any.

    Examples:
        >>> from bmc_torchrl import BMCEpsilon
        >>> data = {"greedy_return": torch.ones(4), "uniform_return": torch.zeros(4)}
        >>> table = what_if(TensorDict(data, [4]), {"bmc": BMCEpsilon()}, every=2)
        >>> table["step"], table["bmc"]
        (tensor([0, 2, 4]), tensor([0.4975, 0.4971, 0.4966], dtype=torch.float64))
    """
    if every < 1:
        raise ValueError(f"every must be at least 1, got {every}.")
    if transitions.batch_dims <= len(batch_shape):
        raise ValueError(
            f"transitions have batch size {tuple(transitions.batch_size)}, and need a dimension of "
            f"time behind batch_shape={list(batch_shape)}."
        )
    bank = StrategyBank(strategies, batch_shape)
    device = transitions.device
    bank = bank if device is None else bank.to(device)
    rows, steps = [bank.epsilons()], [0]
    time = transitions.batch_size[-1]
    for start in range(0, time, every):
        part = transitions[..., start : start + every]
        bank.update(part, taken_with(part, epsilon_key))
        rows.append(bank.epsilons())
        steps.append(min(start + every, time))
    columns = {label: torch.stack([row[label] for row in rows]) for label in bank.labels}
    return TensorDict({"step": torch.tensor(steps), **columns}, [len(steps)])


def _kind(module: nn.Module) -> Any:
    """Equal for modules that differ in the numbers of their buffers alone."""
    settings = {
        name: repr(value)
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in ("training", "batch_shape")
    }
    buffers = [(name, b.dtype, b.shape) for name, b in module.named_buffers(recurse=False)]
    children = tuple((name, _kind(child)) for name, child in module.named_children())
    return type(module), tuple(sorted(settings.items())), tuple(buffers), children


def _side_by_side(strategies: Sequence[EpsilonStrategy], runs: int) -> EpsilonStrategy:
    """Strategies of one :func:`_kind` as one of batch shape ``[strategies * runs]``."""
    merged = copy.deepcopy(strategies[0])
    for path, module in merged.named_modules():
        alike = [strategy.get_submodule(path) for strategy in strategies]
        for name, _ in list(module.named_buffers(recurse=False)):
            rows = torch.stack([other.get_buffer(name) for other in alike])
            setattr(module, name, rows.repeat_interleave(runs, 0))
        if isinstance(module, EpsilonStrategy):
            module.batch_shape = torch.Size([len(strategies) * runs])
    if merged.eps.shape != merged.batch_shape:
        raise ValueError(
            f"{type(merged).__name__} does not follow its batch_shape and buffers, so that it "
            "cannot be one of a bank: leave it out."
        )
    return merged
