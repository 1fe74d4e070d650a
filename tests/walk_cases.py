"""Collected data to walk through, and the tensor functions to walk with."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from bmc_torchrl.likelihoods import NormalGammaPrior
from bmc_torchrl.strategies import EpsilonStrategy, bmc, vdbe

STATES = 5
PRIOR = NormalGammaPrior(mu0=0.3, b0=5.0)
BMC = {
    "one posterior": {},
    "per state": {"num_states": STATES},
    "offline": {"update": "offline"},
    "offline per state": {"update": "offline", "num_states": STATES},
}


def collected(
    shape: Sequence[int], random: torch.Generator, steps: int = 60
) -> tuple[TensorDict, Tensor]:
    """Transitions ``[*shape, steps]``, some of them not taken, infinite, NaN or too large."""
    size = (*shape, steps)
    draw = lambda: torch.rand(size, generator=random)  # noqa: E731
    greedy = (draw() * 6).double()
    greedy[draw() < 0.1] = torch.nan
    greedy[draw() < 0.05] = 1e101
    change = draw() - 0.5
    change[draw() < 0.1] = torch.inf
    entries = {
        "greedy_return": greedy,
        "uniform_return": greedy - 3 * draw(),
        "value_change": change,
        "state": (draw() * STATES).long(),
        "next": {"done": (draw() < 0.1).unsqueeze(-1)},
    }
    names = [None] * len(shape) + ["time"]
    return TensorDict(entries, size, names=names), draw() < 0.8


def by_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, a batch is walked by the operator, as in compiled graphs."""
    monkeypatch.setattr(bmc, "can_walk_in_place", lambda *_: False)


def by_tensors(monkeypatch: pytest.MonkeyPatch, strategy: EpsilonStrategy, *data: object) -> None:
    """The update without a kernel."""
    with monkeypatch.context() as patch:
        by_operator(patch)
        for module in (bmc, vdbe):
            patch.setattr(module, "can_walk", lambda column: False)
        strategy.update(*data)


def assert_equal_states(
    strategy: EpsilonStrategy, expected: EpsilonStrategy, rtol: float = 1e-12, atol: float = 1e-300
) -> None:
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(strategy.state_dict()[key], value, rtol=rtol, atol=atol)
