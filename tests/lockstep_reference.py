"""Small engines, and the library modules in the same order as their reference."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from draws import recorded_draws
from tensordict import TensorDict
from torch import Tensor

from bmc_torchrl.envs import CartPoleEnv, SubgoalGrid, SubgoalGridEnv, SupplyChainEnv, SupplyNetwork
from bmc_torchrl.envs.base import BatchedEnv
from bmc_torchrl.envs.lanes import Noise
from bmc_torchrl.exploration import AdaptiveEGreedyModule, OneStepReturns
from bmc_torchrl.functional import mixture_return
from bmc_torchrl.learners.objectives import tabular_update
from bmc_torchrl.learners.published_fit import adam_state, fit_minibatch
from bmc_torchrl.learners.replay import run_replay_buffer
from bmc_torchrl.learners.settings import (
    ExpectedSarsaSettings,
    PublishedDQNSettings,
    RunSettings,
)
from bmc_torchrl.learners.values import QNetwork, QTable, q_actor
from bmc_torchrl.lockstep import DQNDraws, DQNLockstep, TabularDraws, TabularLockstep
from bmc_torchrl.strategies import (
    BMCEpsilon,
    ConstantEpsilon,
    EpsilonStrategy,
    ExplorationWinsEpsilon,
    GeometricEpsilon,
    PowerEpsilon,
    StackedEpsilon,
    VDBEEpsilon,
)

RUNS = 4
SMALL_GRID = SubgoalGrid(rows=2, columns=3, start=(1, 0), goals=((0, 2), (0, 0)))

SMALL_NETWORK = SupplyNetwork(capacity=(17,), rho_max=5, ship_max=(5,), initial_stocks=(5, 1))

DQN = PublishedDQNSettings(hidden=(7, 6), learning_rate=0.01, batch_size=4, capacity=20, epochs=3)
PENALISED = dataclasses.replace(DQN, l2=0.001)
SARSA = ExpectedSarsaSettings(learning_rate=0.5, decay=0.9, floor=0.3)
ENGINE_OPTIONS = ("block", "compiled", "test_slots")

DOMAINS: dict[str, Any] = {
    "grid": functools.partial(SubgoalGridEnv, SMALL_GRID, max_steps=12),
    "cart": functools.partial(CartPoleEnv, max_steps=12),
    "supply": functools.partial(SupplyChainEnv, SMALL_NETWORK, max_steps=12),
}

STRATEGIES: dict[str, Any] = {
    "constant": lambda env, runs: ConstantEpsilon(0.3, batch_shape=[runs]),
    "geometric": lambda env, runs: GeometricEpsilon(0.5, 0.8, batch_shape=[runs]),
    "power": lambda env, runs: PowerEpsilon(0.5, 1.0, first_index=0, batch_shape=[runs]),
    "vdbe": lambda env, runs: VDBEEpsilon(
        env.num_states, 0.05, 1 / env.num_actions, batch_shape=[runs]
    ),
    "bmc": lambda env, runs: BMCEpsilon(2.0, 2.01, batch_shape=[runs]),
    "wins": lambda env, runs: ExplorationWinsEpsilon(5.0, batch_shape=[runs]),
    "stacked": lambda env, runs: StackedEpsilon(
        [
            BMCEpsilon(2.0, 2.01, batch_shape=[1]),
            VDBEEpsilon(env.num_states, 0.05, 0.5, batch_shape=[runs - 2]),
            ConstantEpsilon(0.3, batch_shape=[1]),
        ]
    ),
}


def make_env(domain: str, runs: int = RUNS, **options: Any) -> BatchedEnv:
    return DOMAINS[domain](batch_size=[runs], **options)


def make_network(env: BatchedEnv, runs: int = RUNS) -> QNetwork:
    torch.manual_seed(1)
    return QNetwork(env.lanes().num_features, env.num_actions, DQN.hidden, runs=runs)


def divided(options: dict[str, Any], **run: Any) -> tuple[RunSettings, dict[str, Any]]:
    """The settings of the runs among `options`, and the engine's own."""
    own = {"compiled": False} | {k: v for k, v in options.items() if k in ENGINE_OPTIONS}
    given = {k: v for k, v in options.items() if k not in ENGINE_OPTIONS}
    return RunSettings(**{"episodes": 50, "gamma": 0.9, "seed": 3, **run, **given}), own


class ReferenceDQN:
    """The order of docs/protocol.md §2 with the library's modules and the global generator."""

    def __init__(self, domain: str, strategy: EpsilonStrategy) -> None:
        self.env = make_env(domain, observation="encoded")
        self.network = make_network(self.env)
        self.actor = q_actor(self.network, self.env.num_actions, in_key="observation")
        self.explore = AdaptiveEGreedyModule(self.env.action_spec, strategy=strategy)
        values = "chosen_value" in strategy.in_keys
        self.returns = OneStepReturns(self.actor, gamma=0.9, terminated_key=None, values=values)
        self.replay = run_replay_buffer(DQN.capacity, RUNS, DQN.batch_size)
        self.parameters = {n: p.data for n, p in self.network.named_parameters()}
        self.moments = adam_state(self.parameters)
        self.carrier = self.env.reset()

    def call(self, parameters: dict[str, Tensor], features: Tensor) -> Tensor:
        return torch.func.functional_call(self.network, parameters, features)

    @torch.no_grad()
    def step(self) -> None:
        transition, following = self.env.step_and_maybe_reset(
            self.explore(self.actor(self.carrier))
        )
        self.returns(transition)
        keys = "observation", "action", ("next", "observation"), ("next", "reward")
        kept = transition.select(*keys, ("next", "terminated"))
        self.replay.extend(kept.unsqueeze(-1).clone())
        transition["value_change"] = torch.zeros(RUNS)
        if self.replay._storage.shape[0] >= DQN.batch_size:
            transition["value_change"] = self.learn(transition)
        self.explore.update(transition)
        self.transition, self.carrier = transition, following

    def learn(self, transition: TensorDict) -> Tensor:
        batch = self.replay.sample()
        after = self.call(self.parameters, batch["next", "observation"]).amax(-1)
        done = batch["next", "terminated"].squeeze(-1)
        target = batch["next", "reward"].squeeze(-1) + 0.9 * torch.where(done, 0.0, after)
        observation, action = transition["observation"], transition["action"].unsqueeze(-1)
        before = self.call(self.parameters, observation).gather(-1, action)
        with torch.enable_grad():
            fit_minibatch(
                self.call,
                self.parameters,
                self.moments,
                batch["observation"],
                batch["action"],
                target,
                epochs=DQN.epochs,
                learning_rate=DQN.learning_rate,
                l2=PENALISED.l2,
            )
        return (self.call(self.parameters, observation).gather(-1, action) - before).squeeze(-1)


def act_of(draws: list[Tensor]) -> Tensor:
    """The coin and the action at the head of `draws`, removed from it: ``[2, runs]``."""
    return draws.pop(0)


def noise_of(domain: str, draws: list[Tensor]) -> Noise:
    """The domain's draws at the head of `draws`, removed from it."""
    empty = torch.zeros(RUNS, 0)
    if domain == "supply":
        return Noise(draws.pop(0), empty)
    return Noise(empty.double(), draws.pop(0) if domain == "cart" else empty)


def make_dqn(
    domain: str,
    strategy: str,
    runs: int = RUNS,
    learner: PublishedDQNSettings = DQN,
    **options: Any,
) -> DQNLockstep:
    env = make_env(domain, runs)
    run, own = divided(options)
    network = make_network(env, runs)
    return DQNLockstep(env, STRATEGIES[strategy](env, runs), run, learner, network=network, **own)


def compare_dqn(domain: str, strategy: str, steps: int, **options: Any) -> None:
    torch.manual_seed(0)
    engine = make_dqn(domain, strategy, learner=PENALISED, **options)
    reference = ReferenceDQN(domain, STRATEGIES[strategy](engine.domain, RUNS))
    before = flat_parameters(reference.network)
    key = "physics" if domain == "cart" else "state"
    engine.state.copy_(reference.carrier[key])
    engine.value.copy_(reference.actor(reference.carrier.clone())["action_value"].detach())
    for time in range(steps):
        draws: list[Tensor] = []
        with recorded_draws(draws):
            reference.step()
        act = act_of(draws)
        noise = noise_of(domain, draws)
        sample = draws.pop(0) if draws else torch.zeros(RUNS, DQN.batch_size).double()
        with torch.no_grad():
            noise = Noise(*(x.unsqueeze(0) for x in noise))
            engine.vector_steps(DQNDraws(act[None], noise, sample[None]), time)
        torch.testing.assert_close(engine.state, reference.carrier[key], rtol=1e-4, atol=1e-5)
        ours, theirs = engine.strategy.eps, reference.explore.eps
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    trained = make_network(make_env(domain))
    engine.export(trained)
    assert_learned_alike(trained, reference.network, before)


def flat_parameters(network: QNetwork) -> Tensor:
    """All parameters of each run, ``[runs, parameters]``."""
    return torch.cat([p.detach().flatten(1) for p in network.parameters()], 1).clone()


def assert_learned_alike(ours: QNetwork, theirs: QNetwork, before: Tensor) -> None:
    """Equal to 1e-4 of what was learned in most runs, and to 1e-2 in all.

    Products are summed in another order, by torch in one that depends on the processor. Where that
    decides whether a unit is off, Adam makes of a gradient that is rounding error as large a step
    as of any other, and the run differs from there on.
    """
    a, b = flat_parameters(ours), flat_parameters(theirs)
    difference = (a - b).norm(dim=1) / (b - before).norm(dim=1)
    assert difference.median() < 1e-4
    assert (difference < 1e-2).all()


class ReferenceSarsa:
    """Expected SARSA in the order of docs/protocol.md §2, with the library's modules."""

    def __init__(self, domain: str, strategy: EpsilonStrategy, next_action: str) -> None:
        self.env = make_env(domain)
        self.table = make_table(self.env)
        self.actor = q_actor(self.table, self.env.num_actions)
        self.explore = AdaptiveEGreedyModule(self.env.action_spec, strategy=strategy)
        values = "chosen_value" in strategy.in_keys
        self.returns = OneStepReturns(self.actor, gamma=0.9, terminated_key=None, values=values)
        self.carrier, self.before = self.env.reset(), next_action == "before"
        self.first = torch.ones(RUNS, dtype=torch.bool)
        self.episodes = torch.zeros(RUNS)
        self.action = torch.zeros(RUNS, dtype=torch.int64)

    @torch.no_grad()
    def step(self) -> None:
        acting = self.explore(self.actor(self.carrier))
        if self.before:
            acting["action"] = torch.where(self.first, acting["action"], self.action)
        transition, following = self.env.step_and_maybe_reset(acting)
        after = self.explore(self.actor(transition["next"].clone()))
        self.action, epsilon = after["action"], after["epsilon"]
        self.returns(transition)
        target = mixture_return(transition["greedy_return"], transition["uniform_return"], epsilon)
        decay = torch.full([RUNS], SARSA.decay) ** self.episodes
        rate = (SARSA.learning_rate * decay).clamp(min=SARSA.floor)
        transition["value_change"] = tabular_update(
            self.table.weight.data, transition["state"], transition["action"], target, rate
        )
        self.explore.update(transition)
        self.first = transition["next", "done"].squeeze(-1)
        self.episodes += self.first
        self.carrier = following


def make_table(env: BatchedEnv, runs: int = RUNS) -> QTable:
    torch.manual_seed(1)
    return QTable(env.num_states, env.num_actions, runs=runs, initializer="normal")


def make_tabular(domain: str, strategy: str, runs: int = RUNS, **options: Any) -> TabularLockstep:
    env = make_env(domain, runs)
    run, own = divided(options, next_action="before")
    return TabularLockstep(
        env, STRATEGIES[strategy](env, runs), run, SARSA, table=make_table(env, runs), **own
    )


def compare_tabular(
    domain: str, strategy: str, steps: int, next_action: str = "before", **options: Any
) -> None:
    torch.manual_seed(0)
    engine = make_tabular(domain, strategy, next_action=next_action, **options)
    reference = ReferenceSarsa(domain, STRATEGIES[strategy](engine.domain, RUNS), next_action)
    key = "physics" if domain == "cart" else "state"
    engine.state.copy_(reference.carrier[key])
    for _ in range(steps):
        draws: list[Tensor] = []
        with recorded_draws(draws):
            reference.step()
        act = act_of(draws)
        noise = Noise(*(x.unsqueeze(0) for x in noise_of(domain, draws)))
        with torch.no_grad():
            engine.vector_steps(TabularDraws(act[None], noise, act_of(draws)[None]))
        torch.testing.assert_close(engine.state, reference.carrier[key], rtol=1e-5, atol=1e-6)
        ours, theirs = engine.strategy.eps, reference.explore.eps
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(engine.table, reference.table.weight.data, rtol=1e-5, atol=1e-6)
    assert engine.greedy.long().equal(engine.table.argmax(-1))
