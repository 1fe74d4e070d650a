"""The lockstep engines against the library's own modules, one vector step at a time."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from bmc_torchrl.envs import CartPoleEnv, SubgoalGrid, SubgoalGridEnv, SupplyChainEnv, SupplyNetwork
from bmc_torchrl.envs.base import BatchedEnv
from bmc_torchrl.envs.factored import active_features, one_hot_encoding
from bmc_torchrl.exploration import AdaptiveEGreedyModule, OneStepReturns
from bmc_torchrl.fitting import adam_state, fit_minibatch
from bmc_torchrl.functional import mixture_return
from bmc_torchrl.lockstep import DQNDraws, DQNLockstep, TabularDraws, TabularLockstep
from bmc_torchrl.lockstep.domains import Noise
from bmc_torchrl.lockstep.network import FlatNetwork, Minibatch, adam_rates, fit
from bmc_torchrl.lockstep.sampling import sampled_rows
from bmc_torchrl.objectives import tabular_update
from bmc_torchrl.replay import distinct_indices, run_replay_buffer
from bmc_torchrl.strategies import (
    BMCEpsilon,
    ConstantEpsilon,
    EpsilonStrategy,
    GeometricEpsilon,
    PowerEpsilon,
    StackedEpsilon,
    VDBEEpsilon,
)
from bmc_torchrl.values import QNetwork, QTable, q_actor

RUNS = 4
SMALL_GRID = SubgoalGrid(rows=2, columns=3, start=(1, 0), goals=((0, 2), (0, 0)))
SMALL_NETWORK = SupplyNetwork(capacity=(17,), rho_max=5, ship_max=(5,), initial_stocks=(5, 1))
DQN = {"learning_rate": 0.01, "batch_size": 4, "capacity": 20, "epochs": 3}

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
    "stacked": lambda env, runs: StackedEpsilon(
        [
            BMCEpsilon(2.0, 2.01, batch_shape=[1]),
            VDBEEpsilon(env.num_states, 0.05, 0.5, batch_shape=[runs - 2]),
            ConstantEpsilon(0.3, batch_shape=[1]),
        ]
    ),
}


@contextmanager
def recorded_draws(log: list[Tensor]) -> Iterator[None]:
    """Log what ``torch.rand`` returns."""
    original = torch.rand

    def rand(*args: Any, **kwargs: Any) -> Tensor:
        log.append(original(*args, **kwargs))
        return log[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand", rand)
        yield


def make_env(domain: str, runs: int = RUNS, **options: Any) -> BatchedEnv:
    return DOMAINS[domain](batch_size=[runs], **options)


def make_network(env: BatchedEnv, runs: int = RUNS) -> QNetwork:
    width = 4 if isinstance(env, CartPoleEnv) else env.num_features
    torch.manual_seed(1)
    return QNetwork(width, env.num_actions, hidden=(7, 6), runs=runs)


class ReferenceDQN:
    """ENGINE's order with the library's modules, drawing from the global generator."""

    def __init__(self, domain: str, strategy: EpsilonStrategy, *, l2: float, mask_key: str) -> None:
        self.mask_key = mask_key
        self.env = make_env(domain, observation="encoded")
        self.network = make_network(self.env)
        self.actor = q_actor(self.network, self.env.num_actions, in_key="observation")
        self.explore = AdaptiveEGreedyModule(self.env.action_spec, strategy=strategy)
        self.returns = OneStepReturns(self.actor, gamma=0.9, terminated_key=None)
        self.replay = run_replay_buffer(DQN["capacity"], RUNS, DQN["batch_size"])
        self.parameters = {n: p.data for n, p in self.network.named_parameters()}
        self.moments, self.l2 = adam_state(self.parameters), l2
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
        kept = transition.select(*keys, ("next", self.mask_key))
        self.replay.extend(kept.unsqueeze(-1).clone())
        transition["value_change"] = torch.zeros(RUNS)
        if self.replay._storage.shape[0] >= DQN["batch_size"]:
            transition["value_change"] = self.learn(transition)
        self.explore.update(transition)
        self.transition, self.carrier = transition, following

    def learn(self, transition: TensorDict) -> Tensor:
        batch = self.replay.sample()
        after = self.call(self.parameters, batch["next", "observation"]).amax(-1)
        done = batch["next", self.mask_key].squeeze(-1)
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
                epochs=DQN["epochs"],
                learning_rate=DQN["learning_rate"],
                l2=self.l2,
            )
        return (self.call(self.parameters, observation).gather(-1, action) - before).squeeze(-1)


def act_of(draws: list[Tensor]) -> Tensor:
    """The coin and the action at the head of `draws`, removed from it: ``[2, runs]``."""
    return torch.stack([draws.pop(0), draws.pop(0)])


def noise_of(domain: str, draws: list[Tensor]) -> Noise:
    """The domain's draws at the head of `draws`, removed from it."""
    empty = torch.zeros(RUNS, 0)
    if domain == "supply":
        return Noise(draws.pop(0), empty)
    return Noise(empty.double(), draws.pop(0) if domain == "cart" else empty)


def make_dqn(domain: str, strategy: str, runs: int = RUNS, **options: Any) -> DQNLockstep:
    env = make_env(domain, runs)
    network = make_network(env, runs)
    options = {"episodes": 50, "gamma": 0.9, "compiled": False, "seed": 3, **DQN, **options}
    return DQNLockstep(env, network, STRATEGIES[strategy](env, runs), **options)


def compare_dqn(domain: str, strategy: str, steps: int, **options: Any) -> None:
    torch.manual_seed(0)
    l2 = 0.001
    engine = make_dqn(domain, strategy, l2=l2, **options)
    mask_key = "done" if engine.mask_truncated else "terminated"
    strategies = STRATEGIES[strategy](engine.domain, RUNS)
    reference = ReferenceDQN(domain, strategies, l2=l2, mask_key=mask_key)
    key = "physics" if domain == "cart" else "state"
    engine.state.copy_(reference.carrier[key])
    engine.value.copy_(reference.actor(reference.carrier.clone())["action_value"].detach())
    for time in range(steps):
        draws: list[Tensor] = []
        with recorded_draws(draws):
            reference.step()
        act = act_of(draws)
        noise = noise_of(domain, draws)
        sample = draws.pop(0) if draws else torch.zeros(RUNS, DQN["batch_size"]).double()
        with torch.no_grad():
            noise = Noise(*(x.unsqueeze(0) for x in noise))
            engine.vector_steps(DQNDraws(act[None], noise, sample[None]), time)
        torch.testing.assert_close(engine.state, reference.carrier[key], rtol=1e-4, atol=1e-5)
        ours, theirs = engine.strategy.eps, reference.explore.eps
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    trained = make_network(make_env(domain))
    engine.export(trained)
    for ours, theirs in zip(trained.parameters(), reference.network.parameters(), strict=True):
        # Adam divides by the gradient's size, so float32's rounding of small gradients shows.
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize(("domain", "strategy"), list(itertools.product(DOMAINS, STRATEGIES)))
def test_dqn_follows_the_library_modules(domain: str, strategy: str) -> None:
    compare_dqn(domain, strategy, steps=40)


@pytest.mark.parametrize("domain", DOMAINS)
def test_targets_may_bootstrap_at_the_step_limit(domain: str) -> None:
    compare_dqn(domain, "bmc", steps=40, mask_truncated=False)


class ReferenceSarsa:
    """Expected SARSA in ENGINE's order with the library's modules."""

    def __init__(self, domain: str, strategy: EpsilonStrategy, next_action: str) -> None:
        self.env = make_env(domain)
        self.table = make_table(self.env)
        self.actor = q_actor(self.table, self.env.num_actions)
        self.explore = AdaptiveEGreedyModule(self.env.action_spec, strategy=strategy)
        self.returns = OneStepReturns(self.actor, gamma=0.9, terminated_key=None)
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
        rate = (0.5 * torch.full([RUNS], 0.9) ** self.episodes).clamp(min=0.3)
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
    options = {"episodes": 50, "gamma": 0.9, "compiled": False, "seed": 3, **options}
    rates = {"learning_rate": 0.5, "decay": 0.9, "floor": 0.3}
    return TabularLockstep(
        env, make_table(env, runs), STRATEGIES[strategy](env, runs), **rates, **options
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


@pytest.mark.parametrize("next_action", ["before", "after"])
@pytest.mark.parametrize(("domain", "strategy"), list(itertools.product(DOMAINS, STRATEGIES)))
def test_expected_sarsa_follows_the_library_modules(
    domain: str, strategy: str, next_action: str
) -> None:
    compare_tabular(domain, strategy, steps=40, next_action=next_action)


MAKERS: dict[str, Any] = {"dqn": make_dqn, "sarsa": make_tabular}


def run_to_end(engine: Any, chunk: int = 100) -> Any:
    while not engine.finished:
        engine.advance(chunk)
    return engine


def results(engine: Any) -> Tensor:
    return torch.stack([engine.steps, engine.returns, engine.epsilons])


@pytest.mark.parametrize("learner", MAKERS)
@pytest.mark.parametrize("domain", DOMAINS)
def test_every_lane_gets_its_episodes_and_their_tests(domain: str, learner: str) -> None:
    engine = run_to_end(MAKERS[learner](domain, "bmc", episodes=3, tests=2))
    assert (engine.episodes_done == 3).all()
    assert results(engine).isfinite().all()
    assert (engine.steps <= 12).all()


@pytest.mark.parametrize("learner", MAKERS)
@pytest.mark.parametrize("domain", DOMAINS)
def test_resuming_changes_no_bit(domain: str, learner: str, tmp_path: Any) -> None:
    options = {"episodes": 6, "tests": 2, "test_slots": 3}
    engine = MAKERS[learner](domain, "stacked", **options)
    engine.advance(16)
    engine.advance(15)
    torch.save(engine.state_dict(), tmp_path / "state.pt")
    engine.advance(17)
    other = MAKERS[learner](domain, "stacked", **{**options, "seed": 99})
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    other.advance(17)
    run_to_end(engine, 100), run_to_end(other, 7)
    assert torch.equal(results(engine), results(other))
    for name, buffer in engine.strategy.state_dict().items():
        assert torch.equal(buffer, other.strategy.state_dict()[name])


@pytest.mark.parametrize("learner", MAKERS)
def test_lanes_do_not_touch_each_other(learner: str) -> None:
    first, second = (MAKERS[learner]("grid", "bmc", episodes=8) for _ in range(2))
    values = second.flat if learner == "dqn" else second.table
    values[2] *= -2.0
    if learner == "sarsa":
        second.greedy.copy_(second.table.argmax(-1))
    run_to_end(first), run_to_end(second)
    same = (results(first) == results(second)).flatten(2).all(-1).all(0)
    assert same.tolist() == [True, True, False, True]


def test_blocks_and_compaction_change_no_result() -> None:
    whole = run_to_end(make_dqn("grid", "geometric", runs=6, episodes=9, block=6))
    blocks = make_dqn("grid", "geometric", runs=6, episodes=9, block=2)
    left = set()
    while not blocks.finished:
        blocks.advance(5)
        left.add(blocks.blocks)
    assert left == {1, 2, 3}
    torch.testing.assert_close(results(whole), results(blocks), rtol=1e-5, atol=1e-6)
    networks = [make_network(make_env("grid", 6), 6) for _ in range(2)]
    whole.export(networks[0]), blocks.export(networks[1])
    for ours, theirs in zip(*(network.parameters() for network in networks), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_the_last_block_is_halved_as_its_lanes_finish() -> None:
    options: dict[str, Any] = {"runs": 24, "episodes": 9}
    expected = results(run_to_end(make_dqn("grid", "geometric", block=2, **options)))
    halved = make_dqn("grid", "geometric", **options)
    sizes = [halved.block]
    while not halved.finished:
        halved.advance(1)
        if halved.block != sizes[-1]:
            sizes.append(halved.block)
            state = halved.state_dict()
            halved = make_dqn("grid", "geometric", **{**options, "seed": 99})
            halved.load_state_dict(state)
        unfinished = int((halved.episodes_done < halved.episodes).sum())
        assert unfinished <= halved.block
    assert sizes == [24, 12, 6]
    torch.testing.assert_close(results(halved), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("learner", MAKERS)
def test_grid_tests_are_greedy_episodes_of_the_q_after_the_episode(learner: str) -> None:
    """With one episode nothing is learned after it; the next test covers more."""
    engine = run_to_end(MAKERS[learner]("grid", "constant", episodes=1))
    env = make_env("grid", observation="encoded")
    q = make_network(env) if learner == "dqn" else make_table(env)
    if learner == "dqn":
        engine.network.unpack(engine.snapshot[engine._slots()], q)
        actor = q_actor(q, 4, in_key="observation")
    else:
        engine.export(q)
        actor = q_actor(q, 4)
    with torch.no_grad():
        episode = env.rollout(12, actor, break_when_any_done=False)
    for lane in range(RUNS):
        done = episode["next", "done"][lane].squeeze(-1)
        length = int(done.int().argmax()) + 1
        rewards = episode["next", "reward"][lane, :length].squeeze(-1)
        expected = (rewards * 0.9 ** torch.arange(length)).sum()
        assert engine.steps[lane, 0] == length
        torch.testing.assert_close(engine.returns[lane, 0].float(), expected)


def test_frozen_lanes_repeat_their_last_results() -> None:
    """Supply-chain never ends by itself, so every test is perfect."""
    engine = run_to_end(
        make_tabular("supply", "geometric", episodes=9, tests=2, stop_after_perfect_tests=4)
    )
    assert torch.equal(engine.epsilons[:, 3:], engine.epsilons[:, 3:4].expand(-1, 6))
    assert torch.equal(engine.returns[:, 3:], engine.returns[:, 3:4].expand(-1, 6))
    assert (engine.epsilons[:, 2] != engine.epsilons[:, 3]).all()
    assert (engine.steps == 12).all()


@pytest.mark.parametrize("learner", MAKERS)
def test_the_logged_epsilon_is_the_mean_over_the_episode(learner: str) -> None:
    engine = run_to_end(MAKERS[learner]("supply", "geometric", episodes=3))
    expected = 0.5 * 0.8 ** torch.arange(3.0).expand(RUNS, -1).double()
    torch.testing.assert_close(engine.epsilons, expected, rtol=1e-6, atol=0)


def test_sampled_rows_are_those_of_the_replay_sampler() -> None:
    uniform, filled = torch.rand(5, 7, 6, dtype=torch.float64), torch.arange(6, 11)
    expected = [distinct_indices(u, int(n)) for u, n in zip(uniform, filled, strict=True)]
    assert torch.equal(sampled_rows(uniform, filled), torch.stack(expected))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.parametrize("domain", DOMAINS)
def test_compiled_dqn_follows_the_library_modules(domain: str) -> None:
    compare_dqn(domain, "stacked", steps=30, compiled=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.parametrize("domain", DOMAINS)
def test_compiled_expected_sarsa_follows_the_library_modules(domain: str) -> None:
    compare_tabular(domain, "stacked", steps=30, compiled=True)


@pytest.mark.parametrize(("embedded", "actions"), [(False, 3), (True, 3), (True, 40)])
@pytest.mark.parametrize("l2", [0.0, 0.01])
def test_the_flat_fit_is_the_published_fit(embedded: bool, actions: int, l2: float) -> None:
    runs, count, sizes = 3, 5, (4, 6)
    network = QNetwork(10, actions, hidden=(7, 6), runs=runs, dtype=torch.float64)
    flat = FlatNetwork((10, 7, 6, actions), embedded)
    start = flat.pack(network)
    state = torch.randint(24, (runs, 2 * count + 1))
    positions = active_features(state, sizes).mT
    dense = one_hot_encoding(state, sizes).double()
    action, reward = torch.randint(actions, (runs, count)), torch.randn(runs, count).double()
    done = torch.rand(runs, count) < 0.3
    inputs = positions if embedded else dense.mT
    batch = Minibatch(inputs[..., :-1], dense[:, :count].mT, action, reward, done)
    rates = torch.tensor(adam_rates(0.01, 1, 4), dtype=torch.float64).view(-1, 1, 1)
    moments = torch.zeros_like(start), torch.zeros_like(start)
    (ours, *_), extra = fit(
        flat,
        (start, *moments),
        batch,
        rates.expand(-1, runs, 1),
        gamma=0.9,
        l2=l2,
        extra=inputs[..., -1:],
    )
    parameters = {name: p.detach() for name, p in network.named_parameters()}
    call = functools.partial(torch.func.functional_call, network)
    torch.testing.assert_close(extra.mT, call(parameters, dense[:, -1:]))
    following = call(parameters, dense[:, count : 2 * count]).amax(-1)
    target = reward + 0.9 * torch.where(done, 0.0, following)
    fit_minibatch(
        call,
        parameters,
        adam_state(parameters),
        dense[:, :count],
        action,
        target,
        epochs=4,
        learning_rate=0.01,
        l2=l2,
    )
    torch.testing.assert_close(ours, flat.pack(network), rtol=1e-7, atol=1e-9)


def test_tests_undo_what_a_lane_learned_after_its_episode() -> None:
    """The same draws, looked at after every step and after every chunk."""
    chunked, stepped = (make_tabular("grid", "constant", runs=8, episodes=20) for _ in range(2))
    stepped.chunk = stepped.unroll_steps = 1
    assert chunked.chunk == 2
    seen: list[list[Tensor]] = [[], []]
    for _ in range(60):
        draws = chunked.draw(2)
        with torch.no_grad():
            chunked._run_chunk(draws)
            for step in range(2):
                stepped._run_chunk(
                    TabularDraws(
                        draws.act[step : step + 1],
                        Noise(*(x[step : step + 1] for x in draws.noise)),
                        draws.act_next[step : step + 1],
                    )
                )
                for lane in stepped.ended.nonzero().squeeze(-1):
                    seen[0].append(torch.cat([lane[None], stepped.greedy[lane].long()]))
                stepped.ended.zero_()
        lanes = chunked.ended.nonzero().squeeze(-1)
        policies = chunked._ended_policies(lanes)
        seen[1] += [torch.cat([a[None], p.long()]) for a, p in zip(lanes, policies, strict=True)]
        chunked.ended.zero_()
    ours, theirs = (sorted(x.tolist() for x in one) for one in seen)
    assert len(ours) > 20
    assert ours == theirs
