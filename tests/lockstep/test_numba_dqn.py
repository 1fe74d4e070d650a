"""The DQN that the numba kernels make up: equal to the torch engine, resuming, what it refuses."""

import dataclasses
import functools
import io

import numpy as np
import pytest
import torch
from kernel_cases import called, double, strategies
from lockstep_reference import (
    DOMAINS,
    DQN,
    PENALISED,
    RUNS,
    STRATEGIES,
    assert_learned_alike,
    flat_parameters,
    make_env,
    make_network,
)

from bmc_torchrl.envs import CartPoleEnv, SubgoalGridEnv, SupplyChainEnv
from bmc_torchrl.envs.factored import one_hot_encoding
from bmc_torchrl.envs.lanes import Noise
from bmc_torchrl.learners.published_fit import adam_state, fit_minibatch
from bmc_torchrl.learners.replay import distinct_indices
from bmc_torchrl.learners.settings import RunSettings
from bmc_torchrl.learners.values import QNetwork, q_actor
from bmc_torchrl.lockstep import DQNDraws, DQNLockstep
from bmc_torchrl.lockstep.numba.dqn import NumbaDQNEngine, _packed
from bmc_torchrl.lockstep.numba.dqn_loops import show
from bmc_torchrl.lockstep.numba.formulas import at
from bmc_torchrl.lockstep.numba.kernels import compile_kernels, multiply, transpose
from bmc_torchrl.lockstep.numba.kernels import distinct_indices as compiled_indices
from bmc_torchrl.lockstep.numba.loops import CURVES
from bmc_torchrl.lockstep.numba.network import (
    describe,
    fit,
    forward,
    greedy_actions,
    placed,
    placed_work,
    work,
)
from bmc_torchrl.strategies import BMCEpsilon

RUN = RunSettings(gamma=0.9, episodes=50, seed=3)


def make(domain, strategy, runs=RUNS, learner=DQN, **options):
    env = make_env(domain, runs)
    own = {"threads": 1} | {k: options.pop(k) for k in ("threads", "network") if k in options}
    run = dataclasses.replace(RUN, **options)
    made = STRATEGIES[strategy](env, runs) if isinstance(strategy, str) else strategy
    return NumbaDQNEngine(env, made, run, learner, **own)


def draws_of(domain, uniforms):
    """The same uniforms as the torch engine takes them."""
    lanes = make_env(domain).lanes()
    act, step, reset, sample = torch.split(uniforms, [2, 1, 4, DQN.batch_size], -1)
    noise = Noise(step[..., : lanes.draws].double(), reset[..., : lanes.resets].float())
    return DQNDraws(act.mT.float().contiguous(), noise, sample.contiguous())


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("domain", DOMAINS)
def test_both_engines_learn_equal_networks_from_equal_draws(domain, strategy, mask, random):
    env, steps = make_env(domain), 30
    run = dataclasses.replace(RUN, mask_terminated=mask)
    network = make_network(env)
    loops = make(domain, strategy, learner=PENALISED, network=network, mask_terminated=mask)
    tensors = DQNLockstep(
        env, STRATEGIES[strategy](env, RUNS), run, PENALISED, network=network, compiled=False
    )
    uniforms = double(steps, RUNS, 7 + DQN.batch_size, random=random)
    uniforms[..., :2], uniforms[..., 3:7] = uniforms[..., :2].float(), uniforms[..., 3:7].float()
    start = loops.state_dict()
    tensors.state.copy_(start["physics" if domain == "cart" else "state"])
    inputs = tensors._inputs(tensors.state.unsqueeze(1))
    tensors.value.copy_(tensors.network.forward(tensors.flat, inputs)[-1].squeeze(-1))
    loops.advance(steps, uniforms=uniforms)
    with torch.no_grad():
        tensors.vector_steps(draws_of(domain, uniforms), 0)
    now = loops.state_dict()
    assert torch.equal(loops.episodes_done, tensors.episodes_done)
    if domain == "cart":
        torch.testing.assert_close(now["physics"], tensors.state, rtol=1e-4, atol=1e-5)
    else:
        assert torch.equal(now["state"], tensors.state)
    torch.testing.assert_close(now["sums"], tensors.sums.mT, rtol=1e-4, atol=1e-5)
    ours, theirs = (make_network(env) for _ in range(2))
    loops.export(ours), tensors.export(theirs)
    assert_learned_alike(ours, theirs, flat_parameters(network))
    learned = STRATEGIES[strategy](env, RUNS)
    loops.write_strategy(learned)
    for key, value in tensors.strategy.state_dict().items():
        if key == "frames" and strategy != "linear":
            continue  # Counted for a warning of the module's alone.
        torch.testing.assert_close(learned.state_dict()[key], value, rtol=1e-2, atol=1e-3)


def results(engine):
    return torch.stack([getattr(engine, name) for name in CURVES])


def run_to_end(engine, chunk=100):
    while not engine.finished:
        engine.advance(chunk)
    return engine


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_run_depends_on_seed_and_index_alone(domain):
    options = {"episodes": 5, "tests": 2}
    whole = run_to_end(make(domain, "bmc", runs=6, **options))
    assert (whole.episodes_done == 5).all()
    assert results(whole).isfinite().all()
    assert (whole.steps <= 12).all()
    chunks = run_to_end(make(domain, "bmc", runs=6, threads=3, **options), 7)
    part = run_to_end(make(domain, "bmc", runs=2, first_run=3, **options))
    assert torch.equal(results(chunks), results(whole))
    assert torch.equal(results(part), results(whole)[:, 3:5])
    untested = run_to_end(make(domain, "bmc", runs=6, episodes=5, tests=0))
    assert torch.equal(untested.losses, whole.losses)
    assert untested.steps.isnan().all()
    other = run_to_end(make(domain, "bmc", runs=6, **(options | {"seed": 4})))
    assert not torch.equal(other.losses, whole.losses)
    assert len(whole.losses.unique(dim=0)) == 6


@pytest.mark.parametrize("domain", DOMAINS)
def test_resuming_changes_no_bit(domain):
    env = make_env(domain)
    build = lambda: strategies(env.num_states, env.num_actions)  # noqa: E731
    options = {"runs": 12, "episodes": 6, "tests": 2}
    whole = run_to_end(make(domain, build(), **options))
    first = make(domain, build(), **options)
    first.advance(29)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = make(domain, build(), **options, seed=99)
    second.load_state_dict(torch.load(file, weights_only=True))
    run_to_end(second, 5)
    assert torch.equal(results(second), results(whole))
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(second.state_dict()[key], value, rtol=0, atol=0, equal_nan=True)


def test_grid_tests_are_greedy_episodes_of_the_network_after_the_episode():
    engine = run_to_end(make("grid", "constant", episodes=1))
    env = make_env("grid", observation="encoded")
    network = make_network(env)
    engine.export(network)
    with torch.no_grad():
        actor = q_actor(network, 4, in_key="observation")
        episode = env.rollout(12, actor, break_when_any_done=False)
    for lane in range(RUNS):
        length = int(episode["next", "done"][lane].squeeze(-1).int().argmax()) + 1
        rewards = episode["next", "reward"][lane, :length].squeeze(-1)
        expected = (rewards * 0.9 ** torch.arange(length)).sum()
        assert engine.steps[lane, 0] == length
        torch.testing.assert_close(engine.returns[lane, 0].float(), expected)


def test_a_run_stops_after_enough_perfect_tests():
    """Supply-chain never ends by itself, so every test is perfect."""
    engine = make("supply", "geometric", episodes=9, tests=2, stop_after_perfect_tests=4)
    engine.advance(4 * 12)
    assert engine.finished
    found = results(engine)
    assert torch.equal(found[..., 4:], found[..., 3:4].expand(-1, -1, 5))
    assert (engine.epsilons[:, 2] != engine.epsilons[:, 3]).all()


def test_the_logged_epsilon_is_the_mean_over_the_episode():
    engine = run_to_end(make("supply", "geometric", episodes=3))
    expected = 0.5 * 0.8 ** torch.arange(3.0).expand(RUNS, -1).double()
    torch.testing.assert_close(engine.epsilons, expected, rtol=1e-6, atol=0)


def test_weights_start_as_the_q_network_draws_them():
    env = make_env("supply", runs := 200)
    ours, theirs = make_network(env, runs), make_network(env, runs)
    make("supply", "constant", runs=runs).export(ours)
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        assert (a.bias == 0).all()
        assert a.weight.mean().abs() < 0.01
        assert a.weight.std().item() == pytest.approx(b.weight.std().item(), rel=0.02)
        assert a.weight.abs().max().item() == pytest.approx(b.weight.abs().max().item(), rel=0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"next_action": "before"}, "DQN acts after learning"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"network": QNetwork(3, 4, (7, 6), runs=RUNS)}, r"widths \[3, 7, 6, 4\], but"),
        ({"network": QNetwork(8, 4, (7, 6), runs=2)}, "runs=4 and no dueling head"),
        ({"strategy": BMCEpsilon(update="offline", batch_shape=[RUNS])}, "engine=torchrl"),
    ],
)
def test_what_the_engine_cannot_do_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        make("grid", **({"strategy": "bmc"} | change))
    with pytest.raises(ValueError, match=r"uniforms must have the shape \(2, 4, 11\)"):
        make("grid", "bmc").advance(2, uniforms=torch.zeros(2, RUNS, 9))


SHAPES = {
    "numbers": (CartPoleEnv(), (12, 12), 32, 1e-6),
    "codes": (SubgoalGridEnv(), (25, 25), 24, 0.0),
    "positions": (SupplyChainEnv(), (100, 100), 64, 0.0),
    "one layer": (SubgoalGridEnv(), (), 5, 0.1),
    "positions, one layer": (SupplyChainEnv(), (), 3, 0.1),
    "three odd layers": (CartPoleEnv(), (3, 17, 9), 7, 0.01),
}


@called
def run_show(net, space, numbers, states):
    network, places = placed(net), placed_work(space)
    for j in range(space.samples):
        p = numbers[j, 0], numbers[j, 1], numbers[j, 2], numbers[j, 3]
        show(network, places, j, p, states[j])


@called
def run_forward(net, parameters, space, count):
    forward(placed(net), at(parameters, 0), placed_work(space), count)


@called
def run_fit(net, parameters, mean, square, space, after, made, gamma, rate, epochs):
    weights, first, second = at(parameters, 0), at(mean, 0), at(square, 0)
    taken, reward, terminated = made
    return fit(
        placed(net), weights, first, second, placed_work(space), placed_work(after),
        taken, reward, terminated, gamma, rate, epochs, 1,
    )  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_the_compiled_fit_is_the_published_fit(shape, random):
    env, hidden, batch, l2 = SHAPES[shape]
    actions, epochs = env.num_actions, 4
    net = describe(env, hidden)
    network = QNetwork(net.widths[0], actions, hidden, runs=1)
    for layer in network.layers:
        torch.nn.init.uniform_(layer.bias, -0.3, 0.3)
    compile_kernels()
    parameters = _packed(network, 1, net)[0].copy()
    spaces = work(net, batch, learning=True, l2=l2), work(net, batch)
    seen, expected = [], []
    for space in spaces:
        # What was shown before leaves no trace.
        for _ in range(2):
            numbers = torch.randn(batch, 4, generator=random)
            state = torch.randint(env.num_states, (batch,), generator=random)
            run_show(net, space, numbers.numpy(), state.numpy())
        seen.append(one_hot_encoding(state, env.sizes) if net.ones else numbers)
        expected.append(network(seen[-1].unsqueeze(0)).detach()[0])
        run_forward(net, parameters, space, batch)
        value = torch.from_numpy(space.outputs[net.outputs[-2] * batch :].reshape(-1, batch)[:-1])
        torch.testing.assert_close(value.mT, expected[-1], rtol=1e-5, atol=1e-5)
    action = torch.randint(actions, (batch,), generator=random)
    reward = torch.randn(batch, generator=random)
    terminated = torch.rand(batch, generator=random) < 0.3
    moments = np.zeros_like(parameters), np.zeros_like(parameters)
    made = action.numpy(), reward.numpy(), terminated.numpy()
    gamma = np.float32(0.9)
    loss = run_fit(net, parameters, *moments, *spaces, made, gamma, 0.001, epochs)
    target = reward + 0.9 * torch.where(terminated, 0.0, expected[1].amax(-1))
    weights = {name: p.detach() for name, p in network.named_parameters()}
    theirs = fit_minibatch(
        functools.partial(torch.func.functional_call, network),
        weights,
        adam_state(weights),
        seen[0][None],
        action[None],
        target[None],
        epochs=epochs,
        learning_rate=0.001,
        l2=l2,
    )
    assert loss == pytest.approx(theirs.item(), rel=1e-5)
    after = torch.from_numpy(_packed(network, 1, net)[0])
    torch.testing.assert_close(torch.from_numpy(parameters), after, rtol=1e-4, atol=2e-5)


@called
def product(rows, inner, columns, a, down, along, b, c, c_row, floor):
    b_row = columns
    multiply(rows, inner, columns, at(a, 0), down, along, at(b, 0), b_row, at(c, 0), c_row, floor)


@pytest.mark.parametrize("rows", [1, 3, 4, 9, 13, 24])
@pytest.mark.parametrize("columns", [1, 2, 3, 4, 7, 8, 12, 16, 25, 100])
def test_products_and_transposes_are_those_of_numpy(rows, columns):
    compile_kernels()
    inner, random = 13, np.random.default_rng(rows * columns)
    a = random.standard_normal((rows, inner)).astype(np.float32)
    b = random.standard_normal((inner, columns)).astype(np.float32)
    wanted, turned = a @ b, np.ascontiguousarray(a.T)
    for left, down, along in ((a, inner, 1), (turned, 1, rows)):
        for floor in (-np.inf, 0.0):
            c = np.full((rows, columns + 2), 7, np.float32)
            sizes = rows, inner, columns
            product(
                *sizes, left.ravel(), down, along, b.ravel(), c.ravel(), columns + 2,
                np.float32(floor),
            )  # fmt: skip
            np.testing.assert_allclose(c[:, :-2], np.maximum(wanted, floor), rtol=1e-4, atol=1e-5)
            assert (c[:, -2:] == 7).all()
    for row in (rows, rows + 3):
        other = np.full((columns, row), 7, np.float32)
        called(transpose)(c[:, :-2].ravel(), other.ravel(), rows, columns, row)
        assert np.array_equal(other[:, :rows], c[:, :-2].T)
        assert (other[:, rows:] == 7).all()


@pytest.mark.parametrize("count", [1, 2, 4, 15, 16, 17, 24, 31, 64, 100])
def test_compiled_rows_of_a_minibatch_are_those_of_the_replay_sampler(count, random):
    filled = count + 3
    uniform = double(20, count, random=random)
    # The first are left, and so each moves all that are drawn later; then any.
    uniform[0] = 0
    expected = distinct_indices(uniform, filled)
    for drawn, wanted in zip(uniform, expected, strict=True):
        left = filled - torch.arange(count)
        rows = np.full(2 * count + 5, -1, np.int32)
        rows[:count] = (drawn * left).int().numpy()
        given = rows[:count].copy()
        called(draw_rows)(rows, count)
        assert np.array_equal(rows[count : 2 * count], wanted.numpy())
        assert np.array_equal(rows[:count], given)
        assert (rows[2 * count :] == -1).all()


def draw_rows(rows, count):
    compiled_indices(at(rows, 0), at(rows, count), count)


def test_of_equal_values_the_first_action_is_greedy():
    net = describe(SubgoalGridEnv(), (5,))
    space = work(net, 20)
    values = space.outputs[net.outputs[-2] * 20 :].reshape(-1, 20)
    values[:-1] = np.arange(80).reshape(4, 20) % 3
    find_greedy(net, space, 17)
    assert np.array_equal(space.chosen[:17], values[:-1, :17].argmax(0))
    assert np.array_equal(space.best[:17], values[:-1, :17].max(0))
    assert not space.best[17:].any()


@called
def find_greedy(net, space, count):
    greedy_actions(placed(net), placed_work(space), count)
