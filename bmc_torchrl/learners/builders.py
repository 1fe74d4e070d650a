"""A greedy Q-actor for an environment and how it learns, from the learner's settings."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from torch import nn
from torchrl.envs import EnvBase
from torchrl.modules import QValueActor

from bmc_torchrl.learners.rules import LearningRule, PublishedDQN, TabularSarsa
from bmc_torchrl.learners.settings import (
    ExpectedSarsaSettings,
    LearnerSettings,
    PublishedDQNSettings,
)
from bmc_torchrl.learners.values import ActiveFeatures, QNetwork, QTable, q_actor

__all__ = ["Learner", "build_learner", "build_network", "mask_key"]


class Learner(NamedTuple):
    """A greedy actor, and the rule by which its values learn."""

    q_actor: QValueActor
    rule: LearningRule


@functools.singledispatch
def build_learner(settings: LearnerSettings, env: EnvBase, gamma: float) -> Learner:
    """The learner that `settings` describe, with a Q of its own for each run of `env`.

    A new learner's settings register here: ``@build_learner.register``.

    Args:
        settings: of one of the learners.
        env: of batch size ``[runs]``.
        gamma: discount factor.

    >>> from bmc_torchrl.envs import SubgoalGridEnv
    >>> settings = ExpectedSarsaSettings(learning_rate=0.7)
    >>> build_learner(settings, SubgoalGridEnv(batch_size=[3]), 0.99).rule.table.weight.shape
    torch.Size([3, 150, 4])
    """
    raise TypeError(f"No learner has settings of the class {type(settings).__name__}.")


@build_learner.register
def _(settings: ExpectedSarsaSettings, env: EnvBase, gamma: float) -> Learner:
    table = QTable(
        env.num_states,
        env.num_actions,
        runs=env.batch_size.numel(),
        initializer=settings.initializer,
        scale=settings.scale,
        device=env.device,
    )
    rule = TabularSarsa(table, settings.learning_rate, decay=settings.decay, floor=settings.floor)
    return Learner(_actor(env, table, "state"), rule)


@build_learner.register
def _(settings: PublishedDQNSettings, env: EnvBase, gamma: float) -> Learner:
    if mask_key(env) is not None:
        raise ValueError("learner=published_dqn knows no action masks; use learner=dqn.")
    runs = env.batch_size.numel()
    network, key = build_network(env, runs, settings.hidden)
    rule = PublishedDQN(
        network,
        runs=runs,
        gamma=gamma,
        learning_rate=settings.learning_rate,
        batch_size=settings.batch_size,
        capacity=settings.capacity,
        epochs=settings.epochs,
        l2=settings.l2,
        feature_key=key,
        device=env.device,
    )
    return Learner(_actor(env, network, key), rule)


def mask_key(env: EnvBase) -> str | None:
    """Where an environment shows its legal actions, if it does."""
    return None if env.observation_spec.get("action_mask", None) is None else "action_mask"


def _actor(env: EnvBase, network: nn.Module, key: str) -> QValueActor:
    """The greedy actor over `network`, among legal actions where the environment has a mask."""
    return q_actor(network, env.num_actions, in_key=key, action_mask_key=mask_key(env))


def build_network(
    env: EnvBase, runs: int | tuple[()], hidden: Sequence[int], dueling: bool = False
) -> tuple[nn.Module, str]:
    """A Q-network on what the environment shows, and the key of that."""
    shown = env.observation_spec.get("observation", None)
    network = QNetwork(
        env.num_features if shown is None else shown.shape[-1],
        env.num_actions,
        hidden,
        runs=runs,
        dueling=dueling,
        active_features=len(env.sizes) if shown is None else None,
        device=env.device,
    )
    if shown is not None:
        return network, "observation"
    return nn.Sequential(ActiveFeatures(env.sizes), network), "state"
