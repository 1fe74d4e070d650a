"""The learners by name: each builds a greedy Q-actor for an environment, and how it learns."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.envs import EnvBase
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from bmc_torchrl.learners.replay import ProportionalSampler, run_replay_buffer
from bmc_torchrl.learners.rules import LearningRule, LossRule, PublishedDQN, TabularSarsa
from bmc_torchrl.learners.values import ActiveFeatures, QNetwork, QTable, q_actor

__all__ = ["Learner", "dqn", "expected_sarsa", "published_dqn"]


class Learner(NamedTuple):
    """A greedy actor, and the rule by which its values learn."""

    q_actor: QValueActor
    rule: LearningRule


def expected_sarsa(
    env: EnvBase,
    runs: int,
    gamma: float,
    *,
    learning_rate: float,
    decay: float = 1.0,
    floor: float = 0.0,
    initializer: str = "zeros",
    scale: float = 0.1,
) -> Learner:
    """Tabular expected SARSA, one table per run.

    Arguments as in :class:`~bmc_torchrl.QTable` and
    :class:`~bmc_torchrl.learners.rules.TabularSarsa`.
    """
    table = QTable(
        env.num_states,
        env.num_actions,
        runs=runs,
        initializer=initializer,
        scale=scale,
        device=env.device,
    )
    rule = TabularSarsa(table, learning_rate, decay=decay, floor=floor)
    return Learner(_actor(env, table, "state"), rule)


def _mask_key(env: EnvBase) -> str | None:
    return None if env.observation_spec.get("action_mask", None) is None else "action_mask"


def _actor(env: EnvBase, network: nn.Module, key: str) -> QValueActor:
    """The greedy actor over `network`, among legal actions where the environment has a mask."""
    return q_actor(network, env.num_actions, in_key=key, action_mask_key=_mask_key(env))


def _network(
    env: EnvBase, runs: int | tuple[()], hidden: Sequence[int], dueling: bool = False
) -> tuple[nn.Module, str]:
    """A Q-network on what the environment shows, and the key of that."""
    if env.observation_spec.get("observation", None) is not None:
        width = env.observation_spec["observation"].shape[-1]
        dense = QNetwork(
            width, env.num_actions, hidden, runs=runs, dueling=dueling, device=env.device
        )
        return dense, "observation"
    sparse = QNetwork(
        env.num_features,
        env.num_actions,
        hidden,
        runs=runs,
        dueling=dueling,
        active_features=len(env.sizes),
        device=env.device,
    )
    return nn.Sequential(ActiveFeatures(env.sizes), sparse), "state"


def published_dqn(
    env: EnvBase,
    runs: int,
    gamma: float,
    *,
    hidden: Sequence[int],
    learning_rate: float,
    batch_size: int,
    capacity: int,
    epochs: int,
    l2: float = 0.0,
) -> Learner:
    """The DQN of the published data, one network per run.

    Arguments as in :class:`~bmc_torchrl.QNetwork` and
    :class:`~bmc_torchrl.learners.rules.PublishedDQN`.
    """
    if _mask_key(env) is not None:
        raise ValueError("learner=published_dqn knows no action masks; use learner=dqn.")
    network, key = _network(env, runs, hidden)
    rule = PublishedDQN(
        network,
        runs=runs,
        gamma=gamma,
        learning_rate=learning_rate,
        batch_size=batch_size,
        capacity=capacity,
        epochs=epochs,
        l2=l2,
        feature_key=key,
        device=env.device,
    )
    return Learner(_actor(env, network, key), rule)


def dqn(
    env: EnvBase,
    runs: int,
    gamma: float,
    *,
    hidden: Sequence[int] = (64, 64),
    learning_rate: float = 1e-3,
    batch_size: int = 64,
    capacity: int = 10_000,
    warmup: int = 64,
    updates_per_step: int = 1,
    target_tau: float = 0.01,
    double: bool = False,
    dueling: bool = False,
    prioritized: bool = False,
    max_grad_norm: float | None = None,
) -> Learner:
    """DQN with a target network as TorchRL's ``DQNLoss`` has it, one network per run.

    Args:
        env: the environment.
        runs: number of runs; each has its own network, replay and minibatches.
        gamma: discount factor.
        hidden: widths of the hidden layers.
        learning_rate: Adam's.
        batch_size: transitions per update.
        capacity: of each run's replay.
        warmup: transitions of each run before the first update.
        updates_per_step: updates per environment step.
        target_tau: of the target network's soft update.
        double: Double DQN.
        dueling: dueling head.
        prioritized: prioritised replay, α = 0.6 and β = 0.4, for one run.
        max_grad_norm: gradient clipping, each run by itself.
    """
    if runs > 1 and prioritized:
        raise ValueError(f"prioritized=true is for one run, got runs={runs}.")
    network, key = _network(env, () if runs == 1 else runs, hidden, dueling)
    actor = _actor(env, network, key)
    loss = DQNLoss(
        actor,
        action_space="categorical",
        delay_value=True,
        double_dqn=double,
        reduction="mean" if runs == 1 else "none",
    )
    loss.make_value_estimator(gamma=gamma)
    kept = [*actor.in_keys, "action"]
    kept += [("next", key) for key in (*actor.in_keys, "reward", "done", "terminated")]
    replay: ReplayBuffer
    if runs == 1:
        storage = LazyTensorStorage(capacity, device=env.device)
        sampler = ProportionalSampler(capacity, alpha=0.6, beta=0.4) if prioritized else None
        replay = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=batch_size)
    else:
        replay = run_replay_buffer(capacity, runs, batch_size, device=env.device)
        warmup = max(warmup, batch_size)
    rule = LossRule(
        loss,
        functools.partial(torch.optim.Adam, lr=learning_rate),
        replay,
        q_actor=actor,
        target_updater=functools.partial(SoftUpdate, tau=target_tau),
        updates_per_step=updates_per_step,
        warmup=warmup,
        keys=kept,
        runs=runs,
        max_grad_norm=max_grad_norm,
    )
    return Learner(actor, rule)
