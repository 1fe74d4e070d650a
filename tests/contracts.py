"""What every strategy is tested with: one factory each, and data that any of them can read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torchrl.data import Categorical, Composite, OneHot, TensorSpec

from bmc_torchrl import (
    AdaptiveEGreedyModule,
    ApexEpsilon,
    BMCEpsilon,
    ConstantEpsilon,
    EpsilonStrategy,
    ExplorationWinsEpsilon,
    GaussianLikelihood,
    GeometricEpsilon,
    LinearEpsilon,
    NormalGammaPrior,
    PowerEpsilon,
    RepeatedAction,
    SoftmaxAction,
    StackedEpsilon,
    UniformAction,
    VDBEEpsilon,
)

STATES, ACTIONS, AGENTS = 3, 4, 2
RUNS = (4,)
MASK = (True, True, False, True)
REJECT = 1e-3
"""Below which probability a fixed seed's draws are called different."""


class Plain(EpsilonStrategy):
    """The least that a user can write: no buffers, nothing to read, nothing to learn."""

    @property
    def eps(self) -> Tensor:
        return torch.full(self.batch_shape, 0.3, dtype=torch.float64)


def stacked(shape: Sequence[int]) -> StackedEpsilon:
    runs, rest = shape[0], tuple(shape[1:])
    return StackedEpsilon(
        [
            BMCEpsilon(batch_shape=(runs - 3, *rest)),
            VDBEEpsilon(STATES, 1.0, 0.25, batch_shape=(1, *rest)),
            GeometricEpsilon(0.5, 0.9, batch_shape=(1, *rest)),
            BMCEpsilon(num_states=STATES, update="offline", batch_shape=(1, *rest)),
        ]
    )


FACTORIES = {
    "plain": Plain,
    "constant": lambda shape: ConstantEpsilon(0.3, batch_shape=shape),
    "apex": lambda shape: ApexEpsilon(0.9, 1.0, batch_shape=shape),
    "geometric": lambda shape: GeometricEpsilon(0.5, 0.9, batch_shape=shape),
    "power": lambda shape: PowerEpsilon(0.5, 0.5, batch_shape=shape),
    "linear": lambda shape: LinearEpsilon(0.8, 0.1, 50, batch_shape=shape),
    "vdbe": lambda shape: VDBEEpsilon(STATES, 1.0, 0.25, batch_shape=shape),
    "wins": lambda shape: ExplorationWinsEpsilon(5.0, batch_shape=shape),
    "bmc": lambda shape: BMCEpsilon(batch_shape=shape),
    "bmc-free": lambda shape: BMCEpsilon(prior=NormalGammaPrior(b0=None), batch_shape=shape),
    "bmc-gaussian": lambda shape: BMCEpsilon(likelihood=GaussianLikelihood(2.0), batch_shape=shape),
    "bmc-running": lambda shape: BMCEpsilon(likelihood=GaussianLikelihood(), batch_shape=shape),
    "bmc-state": lambda shape: BMCEpsilon(num_states=STATES, batch_shape=shape),
    "bmc-offline": lambda shape: BMCEpsilon(update="offline", batch_shape=shape),
    "stacked": stacked,
}
REPLACEMENTS = {
    "uniform": UniformAction,
    "softmax": lambda: SoftmaxAction(0.5),
    "zeta": lambda: RepeatedAction(mu=1.5, longest=50),
}
LEARNING = [name for name in FACTORIES if name not in ("plain", "constant", "apex")]
STRATEGY_SHAPES = [
    (name, shape) for name in FACTORIES for shape in ((), RUNS) if shape or name != "stacked"
]


def action_spec(one_hot: bool, nested: bool = False, batch: Sequence[int] = ()) -> TensorSpec:
    batch = (*batch, AGENTS) if nested else tuple(batch)
    leaf = (
        OneHot(ACTIONS, shape=(*batch, ACTIONS)) if one_hot else Categorical(ACTIONS, shape=batch)
    )
    if not nested:
        return leaf
    agents = Composite(action=leaf, shape=batch)
    return Composite(agents=agents, shape=batch[:-1])


def observed(
    batch: Sequence[int],
    *,
    one_hot: bool = False,
    masked: bool = False,
    nested: bool = False,
    greedy: int = 1,
) -> TensorDict:
    """What a Q-actor leaves behind: a greedy action everywhere, Q, a state and perhaps a mask."""
    whole = (*batch, AGENTS) if nested else tuple(batch)
    action = torch.full(whole, greedy)
    entries: dict[str, object] = {
        "action": F.one_hot(action, ACTIONS).bool() if one_hot else action,
        "action_value": torch.randn(*whole, ACTIONS),
    }
    if masked:
        entries["action_mask"] = torch.tensor(MASK).expand(*whole, ACTIONS).clone()
    known = {
        "state": torch.randint(STATES, tuple(batch)),
        "is_init": torch.zeros(*batch, 1, dtype=torch.bool),
    }
    if not nested:
        return TensorDict({**entries, **known}, batch)
    return TensorDict({"agents": TensorDict(entries, whole), **known}, batch)


def exploring(
    strategy: EpsilonStrategy, *, one_hot=False, masked=False, nested=False, **kwargs
) -> AdaptiveEGreedyModule:
    return AdaptiveEGreedyModule(
        action_spec(one_hot, nested),
        strategy,
        action_key=("agents", "action") if nested else "action",
        action_mask_key=(("agents", "action_mask") if nested else "action_mask")
        if masked
        else None,
        **kwargs,
    )


def transitions(batch: Sequence[int], agents: Sequence[int] = ()) -> TensorDict:
    """Random transitions that every strategy can learn from, some of which end episodes."""
    batch = tuple(batch)
    each = (*batch, *agents)
    done = torch.rand(*batch, 1) < 0.3
    greedy = torch.randn(each)
    data = TensorDict(
        {
            "state": torch.randint(STATES, batch),
            "epsilon": torch.full(each, 0.5),
            "greedy_return": greedy,
            "uniform_return": greedy - 3 * torch.rand(each),
            "value_change": torch.randn(each),
            "next": {"reward": torch.randn(*batch, 1), "done": done, "terminated": done.clone()},
        },
        batch,
    )
    promised = torch.randn(each)
    data["chosen_value"], data["promised_value"] = promised - torch.rand(each), promised
    return data.set("acted_greedily", torch.rand(each) < 0.4)


def recorded(taken: Tensor) -> Tensor:
    """The ε that says where the policy took the action."""
    return 0.5 * taken.float()


def memory(strategy: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of every buffer."""
    return {name: buffer.clone() for name, buffer in strategy.named_buffers()}


def alike(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Equal but for rounding, which differs between a walk's kernel and a single step's tensors."""
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype
        and torch.allclose(first[name], second[name], rtol=1e-12, atol=1e-15)
        for name in first
    )


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Bit for bit, dtypes included."""
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name])
        for name in first
    )
