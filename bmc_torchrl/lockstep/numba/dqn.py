"""The published DQN on CPU cores, one compiled loop per run (docs/protocol.md §4)."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bmc_torchrl.envs.base import BatchedEnv
from bmc_torchrl.learners.settings import PublishedDQNSettings, RunSettings
from bmc_torchrl.learners.values import QNetwork, RunLinear
from bmc_torchrl.lockstep.compiling import announced
from bmc_torchrl.lockstep.numba.arguments import read_strategy
from bmc_torchrl.lockstep.numba.dqn_loops import (
    GIVEN,
    LONG_RECORD,
    SHORT_RECORD,
    DQNLanes,
    DQNRule,
    DQNScratch,
    Minibatch,
    dqn_loops_of,
)
from bmc_torchrl.lockstep.numba.engine import NOTHING, NumbaEngine
from bmc_torchrl.lockstep.numba.loops import CURVES, Scratch
from bmc_torchrl.lockstep.numba.network import Network, describe, work
from bmc_torchrl.strategies import EpsilonStrategy, ScalarRule

__all__ = ["NumbaDQNEngine"]


class NumbaDQNEngine(NumbaEngine):
    """DQN with experience replay and no target network for many independent runs.

    See :class:`NumbaEngine`. A run's weights, moments and gradient stay in the processor's cache
    while it learns.

    Args:
        env: a domain with ``batch_size=[runs]`` that has :meth:`~BatchedEnv.scalars` and
            :meth:`~BatchedEnv.lanes`.
        strategy: the source of ε, of batch shape ``[runs]``; it is read, and written only by
            :meth:`write_strategy`. Several strategies are one :class:`StackedEpsilon`.
        run: how long, how tested, from which seed.
        learner: how the networks look and learn.
        network: initial weights to use instead, ``runs=[runs]``; :meth:`export` gives the trained
            ones.
        threads: how many threads; as many as numba would use by default, all cores in general.

    >>> from bmc_torchrl import BMCEpsilon
    >>> from bmc_torchrl.envs import SubgoalGridEnv
    >>> engine = NumbaDQNEngine(
    ...     SubgoalGridEnv(batch_size=[2], max_steps=10),
    ...     BMCEpsilon(batch_shape=[2]),
    ...     RunSettings(gamma=0.99, episodes=2),
    ...     PublishedDQNSettings(
    ...         hidden=(8,), learning_rate=0.001, batch_size=4, capacity=16, epochs=2
    ...     ),
    ...     threads=1,
    ... )
    >>> engine.advance(30)
    >>> engine.finished, engine.steps.shape
    (True, torch.Size([2, 2]))
    """

    def __init__(
        self,
        env: BatchedEnv,
        strategy: EpsilonStrategy,
        run: RunSettings,
        learner: PublishedDQNSettings,
        *,
        network: QNetwork | None = None,
        threads: int | None = None,
    ) -> None:
        if run.next_action != "after":
            raise ValueError(
                f"next_action={run.next_action!r} is for expected SARSA; DQN acts after learning."
            )
        self.learner = learner
        self._network = describe(env, learner.hidden)
        self._rules, lanes = _lanes(env, strategy, run.episodes, learner, self._network)
        super().__init__(lanes, strategy, threads)
        self._domain = env.scalars()
        self._rule = DQNRule(
            episodes=run.episodes,
            tests=run.tests,
            max_steps=env.step_limit,
            gamma=float(run.gamma),
            mask_terminated=bool(run.mask_terminated),
            enough_perfect=run.stop_after_perfect_tests or 0,
            learning_rate=float(learner.learning_rate),
            batch=learner.batch_size,
            capacity=learner.capacity,
            epochs=learner.epochs,
            l2=float(learner.l2),
            noisy=bool(self._domain.noisy()),
            seed=run.seed,
            first_run=run.first_run,
            drawn=network is None,
        )
        if network is not None:
            self._lanes.networks[:, 0] = _packed(network, self.runs, self._network)
        with announced(f"DQN in {type(env).__name__}"):
            kinds = tuple(type(rule) for rule in self._rules)
            self._advance_lanes = dqn_loops_of(type(self._domain), kinds)
            self._advance(0, NOTHING, 0, 0)
        self.advance(0)

    def advance(self, steps: int, *, uniforms: Tensor | None = None) -> None:
        """Up to `steps` training steps of every unfinished run, tests included.

        Args:
            steps: how many.
            uniforms: draws to use for training instead of each run's own, ``[steps, runs, 7 +
                batch]``: two for the action, one for the step, four for the reset, then those of
                the minibatch.
        """
        given = NOTHING
        if uniforms is not None:
            wanted = steps, self.runs, GIVEN + self.learner.batch_size
            if tuple(uniforms.shape) != wanted:
                raise ValueError(
                    f"uniforms must have the shape {wanted} of [steps, runs, {GIVEN} + batch], "
                    f"got {tuple(uniforms.shape)}."
                )
            given = np.ascontiguousarray(uniforms.double().numpy())
        self._each_block(functools.partial(self._advance, steps, given))

    def _advance(self, steps: int, given: Any, first: int, last: int) -> None:
        net, rule, lanes = self._network, self._rule, self._lanes
        scratch = _scratch(net, rule, lanes.physics.dtype)
        self._advance_lanes(
            self._domain, self._rules, rule, net, lanes, first, last, steps, given, scratch
        )

    @torch.no_grad()
    def export(self, network: QNetwork) -> None:
        """Write the weights of every run into `network`."""
        weights, net = torch.from_numpy(self._lanes.networks[:, 0]), self._network
        for depth, layer in enumerate(_layers_of(network)):
            part = weights[:, net.starts[depth] : net.starts[depth + 1]]
            matrix = part.reshape(self.runs, net.widths[depth] + 1, net.widths[depth + 1])
            layer.weight.copy_(matrix[:, :-1].reshape(layer.weight.shape))
            layer.bias.copy_(matrix[:, -1].reshape(layer.bias.shape))


def _layers_of(network: QNetwork) -> list[RunLinear]:
    return [layer for layer in network.layers if isinstance(layer, RunLinear)]


def _packed(network: QNetwork, runs: int, net: Network) -> Any:
    if network.state_value is not None or network.run_shape != (runs,):
        raise ValueError(f"network must have runs={runs} and no dueling head.")
    layers = _layers_of(network)
    widths = [network.in_features, *(layer.out_features for layer in layers)]
    if widths != (wanted := net.widths.tolist()):
        raise ValueError(f"network has the widths {widths}, but learner and domain {wanted}.")
    parts = [torch.cat([layer.weight, layer.bias.unsqueeze(1)], 1).flatten(1) for layer in layers]
    return torch.cat(parts, 1).detach().cpu().numpy()


def _scratch(net: Network, rule: DQNRule, physics: Any) -> DQNScratch:
    tests = rule.tests
    return DQNScratch(
        before=work(net, rule.batch, learning=True, l2=rule.l2),
        after=work(net, rule.batch),
        alone=work(net, 1),
        tested=work(net, max(tests, 1)),
        minibatch=Minibatch(
            rows=np.zeros(2 * rule.batch, np.int32),
            taken=np.zeros(rule.batch, np.int64),
            reward=np.zeros(rule.batch, np.float32),
            terminated=np.zeros(rule.batch, np.bool_),
        ),
        tests=Scratch(
            physics=np.zeros((tests, 4), physics),
            states=np.zeros(tests, np.int64),
            slots=np.zeros(tests, np.int64),
            streams=np.zeros(tests, np.uint64),
            returns=np.zeros(tests),
        ),
    )


def _lanes(
    env: BatchedEnv,
    strategy: EpsilonStrategy,
    episodes: int,
    learner: PublishedDQNSettings,
    net: Network,
) -> tuple[tuple[ScalarRule, ...], DQNLanes]:
    runs = env.batch_size.numel()
    width = SHORT_RECORD if net.ones else LONG_RECORD
    count = np.zeros((5, runs), np.int64)
    rules, epsilon = read_strategy(strategy, runs, env.num_states, episodes)
    reads_change = np.zeros(runs, np.bool_)
    for part, lanes in strategy.parts():
        reads_change[lanes] = "value_change" in part.in_keys
    return rules, DQNLanes(
        networks=np.zeros((runs, 3, net.starts[-1]), np.float32),
        replay=np.zeros((runs, learner.capacity, width), np.float32),
        time=count[0],
        reads_change=reads_change,
        physics=torch.zeros(runs, 4, dtype=env.physics_dtype).numpy(),
        state=count[1],
        step_count=count[2],
        episode=count[3],
        sums=np.zeros((runs, 3)),
        perfect=count[4],
        bits=np.zeros((runs, 4), np.uint64),
        **epsilon._asdict(),
        curves=np.full((len(CURVES), runs, episodes), np.nan),
    )
