"""How a Q-network learns from replay: on plain tensors, or with TorchRL's loss and buffer."""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss, LossModule, SoftUpdate

from bmc_torchrl.functional import bootstrapped_return
from bmc_torchrl.learners.replay import run_replay_buffer
from bmc_torchrl.learners.ring import Minibatch, Priorities, RingReplay
from bmc_torchrl.learners.td import LossFunction, next_value, td_loss

__all__ = [
    "Experience",
    "Learning",
    "QLearning",
    "Target",
    "TorchRLLearning",
    "dqn_loss",
    "torchrl_learning",
]

Target = Literal["dqn", "double_dqn", "expected_sarsa"]


class Experience(NamedTuple):
    """One transition of every run, each ``[runs, …]``.

    Attributes:
        before: Observation acted on.
        action: Index of the action, int64.
        reward: float32.
        after: Observation after.
        terminated: Whether the episode ended by itself.
        done: Whether it ended, or was cut.
        mask: Legal actions after, or None.
    """

    before: Tensor
    action: Tensor
    reward: Tensor
    after: Tensor
    terminated: Tensor
    done: Tensor
    mask: Tensor | None = None

    def columns(self) -> dict[str, Tensor]:
        """The entries that are there, by name."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class Learning(nn.Module, ABC):
    """What a training step needs: keep a transition, sample, a loss, and what follows a step."""

    @abstractmethod
    def __len__(self) -> int:
        """Transitions of each run that can be sampled."""

    @abstractmethod
    def add(self, experience: Experience) -> None:
        """Keep one transition of every run."""

    @abstractmethod
    def sample(self) -> Any:
        """A minibatch."""

    @abstractmethod
    def loss(self, batch: Any, epsilon: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The loss of each run, ``[runs]`` or ``[]``, and the TD errors for :meth:`after_step`."""

    @abstractmethod
    def after_step(self, batch: Any, error: Tensor | None) -> None:
        """What follows an optimiser step: target network, priorities."""

    @abstractmethod
    def contents(self) -> dict[str, Any]:
        """What replay holds, for a checkpoint."""

    @abstractmethod
    def refill(self, contents: Mapping[str, Any]) -> None:
        """Hold it again."""


class QLearning(Learning):
    """DQN, Double DQN or expected SARSA on a ring of tensors.

    Args:
        network (nn.Module): ``[*runs, batch, …]`` observations to ``[*runs, batch, actions]``.
        gamma (float): Discount factor.
        runs (int or None): Copies of the weights, a leading dimension; None for a plain network.
        target (str): ``"dqn"``, ``"double_dqn"`` or ``"expected_sarsa"``.
        loss_function (str): ``"l2"`` or ``"smooth_l1"``.
        batch_size (int): Transitions per run and minibatch; with ``capacity=1`` the last one.
        capacity (int): Transitions kept, per run.
        n_steps (int): Steps of the return.
        priorities (Priorities or None): Prioritised replay.
        target_tau (float or None): How far each update moves the target network; None for none.
        target_interval (int): Updates between two of these moves.
        mask_terminated (bool): Leave out the bootstrap of terminal states.
    """

    def __init__(
        self,
        network: nn.Module,
        gamma: float,
        *,
        runs: int | None = None,
        target: Target = "dqn",
        loss_function: LossFunction = "smooth_l1",
        batch_size: int = 64,
        capacity: int = 10_000,
        n_steps: int = 1,
        priorities: Priorities | None = None,
        target_tau: float | None = 0.01,
        target_interval: int = 1,
        mask_terminated: bool = True,
    ) -> None:
        super().__init__()
        if target not in ("dqn", "double_dqn", "expected_sarsa"):
            raise ValueError(
                f"loss must be 'dqn', 'double_dqn', 'expected_sarsa' or a TorchRL loss module, got "
                f"{target!r}."
            )
        if loss_function not in ("l2", "smooth_l1"):
            raise ValueError(f"loss_function must be 'l2' or 'smooth_l1', got {loss_function!r}.")
        if capacity < batch_size:
            raise ValueError(f"capacity={capacity} must hold a batch of batch_size={batch_size}.")
        self.network, self.target, self.loss_function = network, target, loss_function
        self.batch_size, self.mask_terminated = batch_size, mask_terminated
        self.target_tau, self.target_interval = target_tau, target_interval
        self.ring = RingReplay(capacity, runs, gamma, n_steps=n_steps, priorities=priorities)
        self.target_network = self.network
        if target_tau is not None:
            self.target_network = copy.deepcopy(network).requires_grad_(False)
        self.updates = 0

    def __len__(self) -> int:
        return len(self.ring)

    def add(self, experience: Experience) -> None:
        """See :class:`Learning`."""
        self.ring.add(experience.columns())

    def draws(self) -> Tensor:
        """Uniform numbers for :meth:`RingReplay.sample`."""
        shape = [self.batch_size] if self.ring.runs is None else [self.ring.runs, self.batch_size]
        return torch.rand(shape, dtype=torch.float32, device=self.ring.time.device)

    def sample(self) -> Minibatch:
        """See :class:`Learning`."""
        return self.ring.sample(self.draws())

    def loss(
        self,
        batch: Minibatch,
        epsilon: Tensor | None = None,
        network: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """See :class:`Learning`; `network` stands for the network where given."""
        q = self.network if network is None else network
        goal = self.goal(batch, epsilon)
        value: Tensor = q(batch.before)
        chosen = value.gather(-1, batch.action.unsqueeze(-1)).squeeze(-1)
        goal = goal.to(chosen.dtype)
        if batch.weight is None:
            reduction = "mean" if chosen.ndim == 1 else "none"
            loss = td_loss(chosen, goal, self.loss_function, reduction)
            return (loss if loss.ndim == 0 else loss.mean(-1)), None
        loss = td_loss(chosen, goal, self.loss_function) * batch.weight
        return loss.mean(-1), (goal - chosen).detach()

    @torch.no_grad()
    def goal(self, batch: Minibatch, epsilon: Tensor | None = None) -> Tensor:
        """The targets of a minibatch."""
        online = self.network(batch.after) if self.target == "double_dqn" else None
        if self.target != "expected_sarsa":
            epsilon = None
        elif epsilon is not None:
            epsilon = epsilon.reshape(-1, 1) if self.ring.runs is not None else epsilon
        following = self.target_network(batch.after).float()
        value = next_value(following, online=online, epsilon=epsilon, mask=batch.mask)
        ended = batch.terminated if self.mask_terminated else None
        return bootstrapped_return(batch.reward, value, batch.discount, ended)

    @torch.no_grad()
    def after_step(self, batch: Minibatch, error: Tensor | None) -> None:
        """See :class:`Learning`."""
        if error is not None:
            self.ring.surprise(batch.rows, error)
        share = self.due_share()
        if share:
            self.move_target(share)

    def due_share(self) -> float:
        """Count an update; how far the target network is to move after it."""
        self.updates += 1
        due = self.target_tau is not None and self.updates % self.target_interval == 0
        return self.target_tau or 0.0 if due else 0.0

    def move_target(self, share: float | Tensor) -> None:
        """Move the target network by `share` of the way to the network."""
        pairs = zip(self.target_network.parameters(), self.network.parameters(), strict=True)
        for target, online in pairs:
            target.lerp_(online.detach(), share)

    def get_extra_state(self) -> dict[str, int]:
        """How many updates there were, so that a checkpoint has it."""
        return {"updates": self.updates}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Go on counting from there."""
        self.updates = state["updates"]

    def contents(self) -> dict[str, Any]:
        """See :class:`Learning`."""
        return self.ring.contents()

    def refill(self, contents: Mapping[str, Any]) -> None:
        """See :class:`Learning`."""
        self.ring.refill(contents)


class TorchRLLearning(Learning):
    """Learning with a TorchRL loss module on a TorchRL replay buffer.

    Args:
        actor (QValueActor): What the loss was built over.
        loss_module (LossModule): ``DQNLoss``, ``DistributionalDQNLoss`` or the like; with several
            runs its ``reduction`` is ``"none"``.
        replay_buffer (ReplayBuffer): Flat, or one that samples ``[runs, batch]``.
        target_updater (SoftUpdate, HardUpdate or None): Stepped after every update.
        runs (int or None): As in :class:`QLearning`.
    """

    def __init__(
        self,
        actor: QValueActor,
        loss_module: LossModule,
        replay_buffer: ReplayBuffer,
        target_updater: Any = None,
        runs: int | None = None,
    ) -> None:
        super().__init__()
        self.loss_module, self.target_updater, self.runs = loss_module, target_updater, runs
        self.replay = replay_buffer
        self.in_keys = list(actor.in_keys)

    def __len__(self) -> int:
        return len(self.replay) if self.runs is None else len(self.replay) // self.runs

    def add(self, experience: Experience) -> None:
        """See :class:`Learning`."""
        self.extend(self.transition(experience))

    def extend(self, data: TensorDictBase) -> None:
        """Keep collected data, ``[runs]`` or ``[frames]``."""
        data = data.clear_device_()
        self.replay.extend(data if self.runs is None else data.unsqueeze(-1))

    def transition(self, experience: Experience) -> TensorDict:
        """An experience as TorchRL lays out a transition."""
        key, *masks = self.in_keys
        after: dict[Any, Any] = {key: experience.after}
        for flag in ("reward", "terminated", "done"):
            after[flag] = getattr(experience, flag).unsqueeze(-1)
        for mask in masks:
            after[mask] = experience.mask
        entries = {key: experience.before, "action": experience.action, "next": after}
        return TensorDict(entries, [len(experience.action)])

    def sample(self) -> TensorDictBase:
        """See :class:`Learning`."""
        found: TensorDictBase = self.replay.sample()
        return found

    def loss(self, batch: TensorDictBase, epsilon: Tensor | None = None) -> tuple[Tensor, None]:
        """See :class:`Learning`."""
        loss: Tensor = self.loss_module(batch).get("loss")
        return loss if self.runs is None else loss.mean(-1), None

    def after_step(self, batch: TensorDictBase, error: Tensor | None) -> None:
        """See :class:`Learning`."""
        if self.target_updater is not None:
            self.target_updater.step()
        if hasattr(self.replay, "update_tensordict_priority"):
            self.replay.update_tensordict_priority(batch)

    def contents(self) -> dict[str, Any]:
        """See :class:`Learning`."""
        target = {} if self.target_updater is None else self.target_updater.state_dict()
        return {"replay": self.replay.state_dict(), "target": target}

    def refill(self, contents: Mapping[str, Any]) -> None:
        """See :class:`Learning`."""
        self.replay.load_state_dict(contents["replay"])
        if self.target_updater is not None:
            self.target_updater.load_state_dict(contents["target"])


def dqn_loss(name: str, gamma: float, runs: int | None, actor: QValueActor) -> DQNLoss:
    """TorchRL's ``DQNLoss`` of a name, with a loss of its own for each run."""
    double = {"dqn": False, "double_dqn": True}
    if name not in double:
        raise ValueError(
            f"TorchRL's loss must be 'dqn', 'double_dqn' or a loss module, got {name!r}."
        )
    reduction = "mean" if runs is None else "none"
    options = {"action_space": "categorical", "delay_value": True, "reduction": reduction}
    loss = DQNLoss(actor, double_dqn=double[name], **options)
    loss.make_value_estimator(gamma=gamma)
    return loss


def torchrl_learning(
    actor: QValueActor,
    gamma: float,
    *,
    runs: int | None = None,
    loss: Target | LossModule | Callable[[QValueActor], LossModule] = "dqn",
    replay_buffer: ReplayBuffer | None = None,
    target_updater: Callable[[LossModule], Any] | None = None,
    batch_size: int = 64,
    capacity: int = 10_000,
    target_tau: float | None = 0.01,
) -> TorchRLLearning:
    """TorchRL's parts for what is not handed over: its loss, its buffer, its target updater.

    Args:
        actor (QValueActor): The greedy actor.
        gamma (float): Discount factor.
        runs (int or None): As in :class:`QLearning`.
        loss (str, LossModule or callable): A name makes a ``DQNLoss``; a function is given `actor`.
        replay_buffer (ReplayBuffer or None): By default one in memory, per run.
        target_updater (callable or None): Is given the loss module; ``SoftUpdate`` by default.
        batch_size (int): Of the default buffer.
        capacity (int): Of the default buffer, per run.
        target_tau (float or None): Of the default updater; None for none.
    """
    if isinstance(loss, str):
        module: LossModule = dqn_loss(loss, gamma, runs, actor)
    else:
        module = loss if isinstance(loss, LossModule) else loss(actor)
    if target_updater is None and target_tau is not None and module.delay_value:
        target_updater = functools.partial(SoftUpdate, tau=target_tau)
    updater = None if target_updater is None else target_updater(module)
    if replay_buffer is None and runs is not None:
        replay_buffer = run_replay_buffer(capacity, runs, batch_size)
    elif replay_buffer is None:
        storage = LazyTensorStorage(capacity)
        replay_buffer = TensorDictReplayBuffer(storage=storage, batch_size=batch_size)
    return TorchRLLearning(actor, module, replay_buffer, updater, runs)
