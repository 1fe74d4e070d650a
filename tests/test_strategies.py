import copy
import math
import pickle
import warnings

import pytest
import torch
from contracts import (
    AGENTS,
    FACTORIES,
    LEARNING,
    MASK,
    RUNS,
    STATES,
    STRATEGY_SHAPES,
    action_spec,
    exploring,
    memory,
    observed,
    same,
    stacked,
    transitions,
)
from probes import ProbeEnv, exit_step
from scipy import stats
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.collectors.utils import split_trajectories
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import EGreedyModule

from bmc_torchrl import (
    AdaptiveEGreedyModule,
    BMCEpsilon,
    ConstantEpsilon,
    EpsilonStrategy,
    GaussianLikelihood,
    GeometricEpsilon,
    LinearEpsilon,
    NormalGammaPrior,
    PowerEpsilon,
    StackedEpsilon,
    VDBEEpsilon,
)

each_strategy = pytest.mark.parametrize(("name", "shape"), STRATEGY_SHAPES)


# The contract: every strategy, inside the module.


@each_strategy
@pytest.mark.parametrize("one_hot", [False, True], ids=["categorical", "one_hot"])
@pytest.mark.parametrize("masked", [False, True], ids=["free", "masked"])
@pytest.mark.parametrize("nested", [False, True], ids=["root", "nested"])
def test_every_strategy_acts_with_its_epsilon(name, shape, one_hot, masked, nested):
    layout = {"one_hot": one_hot, "masked": masked, "nested": nested}
    explore = exploring(FACTORIES[name](shape), **layout)
    before = memory(explore)
    legal = torch.tensor([allowed or not masked for allowed in MASK])
    for time in ((), (300,)):
        td = observed((*shape, *time), **layout)
        old = td.clone()
        expected = explore.eps.float()
        explore(td)
        where = ("agents", "{}") if nested else ("{}",)
        action, epsilon = (
            td[tuple(part.format(key) for part in where)] for key in ("action", "epsilon")
        )
        previous = old["agents", "action"] if nested else old["action"]
        assert action.shape == previous.shape
        assert action.dtype == previous.dtype
        batch = (*shape, *time, AGENTS) if nested else (*shape, *time)
        wide = expected.reshape((*shape, *[1] * (len(batch) - len(shape)))).expand(batch)
        torch.testing.assert_close(epsilon, wide)
        if one_hot:
            assert (action.sum(-1) == 1).all()
            action = action.int().argmax(-1)
        assert legal[action].all()
        for key in old.keys(True, True):
            if key not in explore.out_keys:
                assert torch.equal(td[key], old[key])
    explored = 1 - wide.double() * (legal.sum() - 1) / legal.sum()
    spread = (explored * (1 - explored) / wide[..., 0].numel() / 300).sqrt().mean()
    assert abs((action == 1).double().mean() - explored.mean()) < 5 * max(spread, 0.01)
    assert same(before, memory(explore))


@each_strategy
@pytest.mark.parametrize("nested", [False, True], ids=["root", "nested"])
def test_only_the_random_exploration_type_explores(name, shape, nested):
    explore = exploring(FACTORIES[name](shape), nested=nested)
    for kind in ExplorationType:
        td = observed((*shape, 50), nested=nested)
        with set_exploration_type(kind):
            explore(td)
        acted = td["agents"] if nested else td
        explores = kind == ExplorationType.RANDOM
        assert bool((acted["action"] != 1).any()) == explores
        assert bool((acted["epsilon"] > 0).all()) == explores


@each_strategy
def test_walking_time_is_stepping_through_it(name, shape):
    walked, stepped = FACTORIES[name](shape), FACTORIES[name](shape)
    data = transitions((*shape, 9))
    walked.update(data)
    for time in range(9):
        stepped.update(data[..., time])
    assert same(memory(walked), memory(stepped))
    if name != "constant":
        assert not same(memory(walked), memory(FACTORIES[name](shape)))


@pytest.mark.parametrize("name", FACTORIES)
def test_a_batch_of_runs_is_each_run_alone(name):
    data = transitions((*RUNS, 9))
    together = FACTORIES[name](RUNS)
    together.update(data)
    for run in range(*RUNS):
        if isinstance(together, StackedEpsilon):
            alone, part = copy.deepcopy(stacked(RUNS).strategies[run]), data[run : run + 1]
        else:
            alone, part = FACTORIES[name](()), data[run]
        alone.update(part)
        assert torch.equal(together.eps[run], alone.eps.squeeze())


@each_strategy
def test_state_survives_saving_copying_and_pickling(name, shape):
    explore = exploring(FACTORIES[name](shape))
    data = transitions((*shape, 5))
    explore.update(data)
    loaded = exploring(FACTORIES[name](shape))
    loaded.load_state_dict(explore.state_dict())
    twins = [loaded, copy.deepcopy(explore), pickle.loads(pickle.dumps(explore))]
    later = transitions((*shape, 5))
    kept = memory(explore)
    for twin in twins:
        assert same(memory(twin), kept)
        twin.update(later)
    assert same(memory(explore), kept)
    explore.update(later)
    for twin in twins:
        assert same(memory(twin), memory(explore))
        torch.manual_seed(1)
        ours = explore(observed(shape))
        torch.manual_seed(1)
        assert (twin(observed(shape)) == ours).all()


@each_strategy
@pytest.mark.parametrize("cast", [lambda m: m.half(), lambda m: m.to(torch.bfloat16)])
def test_casting_keeps_the_precision_of_the_memory(name, shape, cast):
    explore = exploring(FACTORIES[name](shape))
    explore.update(transitions((*shape, 5)))
    before = memory(explore)
    assert same(memory(cast(explore)), before)


@each_strategy
def test_buffers_stay_where_they_are(name, shape):
    explore = exploring(FACTORIES[name](shape))
    where = {key: buffer.data_ptr() for key, buffer in explore.named_buffers()}
    for time in ((), (3,)):
        explore(observed((*shape, *time)))
        explore.update(transitions((*shape, *time)))
        explore.step(2)
    assert where == {key: buffer.data_ptr() for key, buffer in explore.named_buffers()}


@each_strategy
def test_updates_inside_the_module_are_those_of_the_strategy(name, shape):
    explore, strategy = exploring(FACTORIES[name](shape)), FACTORIES[name](shape)
    data = transitions((*shape, 6))
    explore.update(data)
    strategy.update(data)
    assert same(memory(explore.strategy), memory(strategy))
    assert torch.equal(explore.eps, strategy.eps)
    assert explore.eps.shape == shape


@pytest.mark.parametrize("name", FACTORIES)
def test_every_strategy_declares_what_it_reads(name):
    strategy, data = FACTORIES[name](RUNS), transitions((*RUNS, 4))
    twin = FACTORIES[name](RUNS)
    strategy.update(data)
    twin.update(data.select(*strategy.in_keys, "epsilon"))
    assert same(memory(strategy), memory(twin))
    for key in strategy.in_keys:
        with pytest.raises(KeyError, match=str(key if isinstance(key, str) else key[-1])):
            strategy.update(data.exclude(key))
    assert same(memory(strategy), memory(twin))


# What does not belong in a posterior.


@pytest.mark.parametrize("name", LEARNING)
@pytest.mark.parametrize("mark", ["padding", "random frames"])
def test_steps_that_the_policy_did_not_take_teach_nothing(name, mark):
    data = transitions((*RUNS, 12))
    real = torch.rand(12) < 0.5
    if mark == "padding":
        data["collector"] = TensorDict({"mask": real.expand(*RUNS, 12)}, data.batch_size)
    else:
        data["epsilon"] = data["epsilon"] * real
    marked, picked = FACTORIES[name](RUNS), FACTORIES[name](RUNS)
    marked.update(data)
    if "offline" in name or name == "stacked":
        data["next", "done"][:, ~real] = False
        marked = FACTORIES[name](RUNS)
        marked.update(data)
    picked.update(data[:, real])
    for key in ("alpha", "beta", "episodes", "frames", "epsilons", "return_count", "return_m2"):
        if key in dict(marked.named_buffers()):
            assert torch.equal(marked.get_buffer(key), picked.get_buffer(key))
    assert torch.equal(marked.eps, picked.eps)
    untouched = FACTORIES[name](RUNS)
    untouched.update(data[:, ~real])
    assert torch.equal(untouched.eps, FACTORIES[name](RUNS).eps)


@pytest.mark.parametrize("name", LEARNING)
def test_random_frames_of_a_collector_teach_nothing(name):
    env = ProbeEnv(exit_step, batch_size=RUNS)
    explore = AdaptiveEGreedyModule(env.action_spec, FACTORIES[name](RUNS))
    start = memory(explore.strategy)
    greedy = TensorDictModule(torch.zeros_like, in_keys=["state"], out_keys=["action"])
    collector = Collector(
        env,
        TensorDictSequential(greedy, explore),
        frames_per_batch=8,
        total_frames=24,
        init_random_frames=16,
        auto_register_policy_transforms=False,
    )
    for batch, data in enumerate(collector):
        data["greedy_return"] = data["next", "reward"].squeeze(-1) + 1
        data["uniform_return"] = torch.zeros(data.batch_size)
        data["value_change"] = torch.ones(data.batch_size)
        explore.update(data)
        warm_up = batch < 2
        assert bool((data["epsilon"] == 0).all()) == warm_up
        assert bool((data["epsilon"] > 0).all()) != warm_up
        changed = not torch.equal(explore.eps, FACTORIES[name](RUNS).eps)
        assert changed != warm_up
    collector.shutdown()
    assert not same(start, memory(explore.strategy))


@pytest.mark.parametrize("mask_key", ["mask", ("collector", "mask")])
def test_padding_of_split_trajectories_teaches_nothing(mask_key):
    data = transitions((2, 12))
    data["next", "done"][:] = False
    data["next", "done"][0, [3, 11]] = True
    data["next", "done"][1, [6, 11]] = True
    prefix = None if mask_key == "mask" else "collector"
    split = split_trajectories(data, prefix=prefix, done_key="done")
    mask = split[mask_key]
    assert int((~mask).sum()) > 0
    padded, walked = BMCEpsilon(), BMCEpsilon()
    padded.update(split)
    for time in range(split.shape[1]):
        for trajectory in range(split.shape[0]):
            if mask[trajectory, time]:
                walked.update(split[trajectory, time])
    assert float(padded.log_evidence_ratio) == 0  # of the last step, which is padding
    walked.log_evidence_ratio.zero_()
    assert same(memory(padded), memory(walked))
    assert int(padded.return_count) == 24
    garbage = split.clone()
    for key in ("greedy_return", "uniform_return"):
        garbage[key] = torch.where(mask, garbage[key], torch.nan)
    other = BMCEpsilon()
    other.update(garbage)
    assert same(memory(other), memory(padded))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e200])
@pytest.mark.parametrize("key", ["greedy_return", "uniform_return"])
@pytest.mark.parametrize("name", [name for name in LEARNING if name.startswith("bmc")])
def test_returns_that_are_not_finite_are_skipped_and_counted(name, key, bad):
    data = transitions((*RUNS, 10))
    data[key] = data[key].double()
    data["next", "done"][:, 3:5] = False
    data[key][:, 3:5] = bad
    skipping, spared = FACTORIES[name](RUNS), FACTORIES[name](RUNS)
    skipping.update(data)
    spared.update(torch.cat([data[:, :3], data[:, 5:]], 1))
    assert (skipping.skipped == 2).all()
    skipping.skipped.zero_()
    assert same(memory(skipping), memory(spared))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_vdbe_skips_value_changes_that_are_not_finite(bad):
    data = transitions((*RUNS, 10))
    data["value_change"][:, 3:5] = bad
    skipping, spared = FACTORIES["vdbe"](RUNS), FACTORIES["vdbe"](RUNS)
    skipping.update(data)
    spared.update(torch.cat([data[:, :3], data[:, 5:]], 1))
    assert same(memory(skipping), memory(spared))


def test_an_epsilon_that_decayed_to_nothing_can_rise_again():
    explore = AdaptiveEGreedyModule(
        action_spec(False), VDBEEpsilon(1, 1.0, 0.5, initial=0.5, batch_shape=[1])
    )
    data = transitions((1, 200))
    for change, rises in ((0.0, False), (5.0, True)):
        data["epsilon"] = explore(observed((1, 200)))["epsilon"]
        data["value_change"] = torch.full((1, 200), change)
        explore.update(data)
        assert (float(explore.eps) > 0.5) == rises
    explore.update(
        data.set("epsilon", torch.zeros(1, 200)).set("value_change", torch.zeros(1, 200))
    )
    assert float(explore.eps) > 0.5


# ε-BMC.


def reference_epsilons(alpha, beta, returns, mu0=0.0, tau0=1.0, a0=500.0, b0=500.0):
    """ε after each (greedy, uniform) return, in the notation of PROTOCOL §1 and plain floats."""
    n, epsilon, seen, epsilons = alpha + beta, alpha / (alpha + beta), [], []
    for greedy, uniform in returns:
        seen.append((1 - epsilon) * greedy + epsilon * uniform)
        count, mean = len(seen), math.fsum(seen) / len(seen)
        variance = math.fsum((g - mean) ** 2 for g in seen) / max(count - 1, 1)
        a = a0 + count / 2
        b = b0 + count / 2 * (variance + tau0 / (tau0 + count) * (mean - mu0) ** 2)
        tau, gap2 = 1 - 2 * epsilon, (greedy - uniform) ** 2
        log_ratio = (a + 0.5) * math.log1p(tau * gap2 / (2 * b + epsilon**2 * gap2))
        y = -math.expm1(-log_ratio)
        q = epsilon * (1 - epsilon) * y / (1 - epsilon * y)
        p = epsilon * (1 - y) / (1 - epsilon * y)
        spread = n**2 * epsilon * (1 - epsilon)
        spread += n * (epsilon * (1 - p) + (1 - epsilon) * p) + p * (1 - p) * (n + 2)
        growth = n * q * ((n + 1) * tau + (n + 2) * q) / spread
        epsilon, n = epsilon - q / (n + 1), n + growth
        epsilons.append(epsilon)
    return epsilons


@pytest.mark.parametrize(("alpha0", "beta0"), [(1.0, 1.01), (10.0, 10.01), (750.0, 750.01)])
@pytest.mark.parametrize("prior", [NormalGammaPrior(), NormalGammaPrior(1.0, 2.0, 3.0, 0.5)])
def test_bmc_follows_the_written_equations(alpha0, beta0, prior):
    data = transitions((60,))
    pairs = list(zip(data["greedy_return"].tolist(), data["uniform_return"].tolist(), strict=True))
    expected = reference_epsilons(alpha0, beta0, pairs, prior.mu0, prior.tau0, prior.a0, prior.b0)
    strategy = BMCEpsilon(alpha0, beta0, prior=prior)
    for step, value in zip(data, expected, strict=True):
        strategy.update(step)
        assert float(strategy.eps) == pytest.approx(value, rel=1e-9)
    assert float(strategy.eps) < alpha0 / (alpha0 + beta0)


def test_the_posterior_is_a_beta_distribution():
    strategy = BMCEpsilon([2.0, 0.5], [3.0, 7.0], batch_shape=[2])
    strategy.update(transitions((2, 20)))
    oracle = stats.beta(strategy.alpha.numpy(), strategy.beta.numpy())
    assert strategy.mean.numpy() == pytest.approx(oracle.mean())
    assert strategy.variance.numpy() == pytest.approx(oracle.var())
    assert strategy.distribution.variance.numpy() == pytest.approx(oracle.var())
    for side, bound in zip((0.05, 0.95), strategy.credible_interval(0.9), strict=True):
        assert bound.numpy() == pytest.approx(oracle.ppf(side), rel=1e-4)


def test_the_moments_are_those_of_the_mixture_returns():
    strategy = BMCEpsilon(2.0, 3.0)
    seen = []
    for step in transitions((30,)):
        epsilon = float(strategy.eps)
        greedy, uniform = float(step["greedy_return"]), float(step["uniform_return"])
        seen.append((1 - epsilon) * greedy + epsilon * uniform)
        strategy.update(step)
    assert float(strategy.return_variance) == pytest.approx(
        torch.tensor(seen).double().var().item()
    )
    assert float(strategy.return_mean) == pytest.approx(sum(seen) / 30)


@pytest.mark.parametrize("states", [None, STATES])
def test_offline_holds_epsilon_for_an_episode_and_then_replays_it(states):
    offline = BMCEpsilon(num_states=states, update="offline", batch_shape=RUNS)
    online = BMCEpsilon(num_states=states, batch_shape=RUNS)
    data = transitions((*RUNS, 30))
    shown = online.mean.clone()
    for time in range(30):
        step = data[:, time]
        torch.testing.assert_close(offline.mean, shown, rtol=0, atol=0)
        online.update(step)
        offline.update(step)
        ended = step["next", "done"] if states else step["next", "done"].squeeze(-1)
        shown = torch.where(ended, online.mean, shown)
    assert not torch.equal(offline.mean, online.mean)
    assert same(
        {key: value for key, value in memory(online).items() if key.startswith("return_")},
        {key: value for key, value in memory(offline).items() if key.startswith("return_")},
    )


@pytest.mark.parametrize("update", ["online", "offline"])
@pytest.mark.parametrize("shape", [(), RUNS])
def test_one_state_is_no_state(update, shape):
    free = BMCEpsilon(update=update, batch_shape=shape)
    single = BMCEpsilon(num_states=1, update=update, batch_shape=shape)
    data = transitions((*shape, 20))
    data["state"].zero_()
    free.update(data)
    single.update(data)
    for key, value in memory(free).items():
        assert torch.equal(value, single.get_buffer(key).reshape(value.shape))
    assert torch.equal(single.epsilon(data[..., 0]), free.epsilon(data[..., 0]))


@pytest.mark.parametrize("encoding", ["index", "column", "one_hot", "float one_hot"])
@pytest.mark.parametrize("name", ["bmc-state", "vdbe"])
def test_each_state_learns_only_from_leaving_it(name, encoding):
    data = transitions((*RUNS, 40))
    index = data["state"].clone()
    one_hot = torch.nn.functional.one_hot(index, STATES)
    encodings = {"index": index, "column": index[..., None], "one_hot": one_hot}
    data["state"] = encodings.get(encoding, one_hot.float())
    strategy = FACTORIES[name](RUNS)
    strategy.update(data)
    table = strategy.mean if name == "bmc-state" else strategy.epsilons
    for run in range(*RUNS):
        for state in range(STATES):
            alone = BMCEpsilon() if name == "bmc-state" else VDBEEpsilon(1, 1.0, 0.25)
            alone.update(data[run][index[run] == state])
            assert torch.equal(table[run, state], alone.eps)
    now = strategy.epsilon(data[:, 0])
    assert torch.equal(now, table.gather(-1, index[:, :1]).squeeze(-1))
    torch.testing.assert_close(strategy.eps, table.mean(-1))


@pytest.mark.parametrize("name", LEARNING[:-2])
def test_a_pooled_strategy_sees_every_environment_time_slowest(name):
    data = transitions((3, 5, 4))
    pooled, walked = FACTORIES[name](()), FACTORIES[name](())
    pooled.update(data)
    for time in range(4):
        for first in range(3):
            for second in range(5):
                walked.update(data[first, second, time])
    assert same(memory(pooled), memory(walked))


def test_runs_with_their_own_prior_keep_it():
    strategy = BMCEpsilon([1.0, 5.0], torch.tensor([1.01, 20.0]), num_states=2, batch_shape=[2])
    assert strategy.mean[:, 0].tolist() == pytest.approx([1 / 2.01, 0.2])
    assert torch.equal(strategy.alpha, torch.tensor([[1.0, 1.0], [5.0, 5.0]]).double())


# Agents.


@pytest.mark.parametrize("time", [(), (6,)])
@pytest.mark.parametrize("name", ["vdbe", "bmc", "bmc-state", "bmc-offline"])
def test_agents_may_each_have_their_own_epsilon(name, time):
    data = transitions((*RUNS, *time), agents=(AGENTS,))
    together = FACTORIES[name]((*RUNS, AGENTS))
    together.update(data)
    for agent in range(AGENTS):
        alone, part = FACTORIES[name](RUNS), data.clone()
        for key in ("greedy_return", "uniform_return", "value_change", "epsilon"):
            part[key] = part[key][..., agent]
        alone.update(part)
        assert torch.equal(together.eps[:, agent], alone.eps)


@pytest.mark.parametrize("name", ["vdbe", "bmc", "bmc-state", "bmc-offline"])
def test_agents_may_share_an_epsilon_and_are_walked_within_each_step(name):
    data = transitions((*RUNS, 6), agents=(AGENTS,))
    pooled, walked = FACTORIES[name](RUNS), FACTORIES[name](RUNS)
    pooled.update(data)
    for time in range(6):
        for agent in range(AGENTS):
            part = data[:, time].clone()
            for key in ("greedy_return", "uniform_return", "value_change", "epsilon"):
                part[key] = part[key][..., agent]
            walked.update(part)
    assert same(memory(pooled), memory(walked))


@pytest.mark.parametrize("name", ["geometric", "power", "linear"])
def test_schedules_count_runs_however_many_agents_record_epsilon(name):
    data = transitions((*RUNS, 6), agents=(AGENTS,))
    data["epsilon"][:, 0] = 0
    strategy, expected = FACTORIES[name](RUNS), FACTORIES[name](RUNS)
    strategy.update(data)
    expected.update(data[:, 1:].exclude("epsilon"))
    assert same(memory(strategy), memory(expected))


def test_as_many_runs_as_agents_are_told_apart():
    data = transitions((3,), agents=(3,))
    per_run, per_agent = BMCEpsilon(batch_shape=[3]), BMCEpsilon(batch_shape=[3])
    per_run.update(data)
    for run in range(3):
        alone = BMCEpsilon()
        for agent in range(3):
            keys = ("greedy_return", "uniform_return")
            alone.update(TensorDict({key: data[key][run, agent] for key in keys}))
        assert torch.equal(per_run.eps[run], alone.eps)
    data.names = ["time"]
    per_agent.update(data)
    transposed = BMCEpsilon(batch_shape=[3])
    swapped = {key: data[key].T for key in ("greedy_return", "uniform_return")}
    transposed.update(TensorDict(swapped, [3, 3]))
    assert torch.equal(per_agent.eps, transposed.eps)


@pytest.mark.parametrize("name", ["bmc-state", "vdbe"])
def test_every_agent_may_have_its_own_state(name):
    agents = STATES  # as many agents as states: indices must not be read as one-hot vectors
    shape = (2, agents)
    strategy = FACTORIES[name](shape)
    strategy.state_key = ("agents", "state")
    data = transitions((2, 6), agents=(agents,))
    state = torch.randint(STATES, (2, 6, agents))
    data["agents"] = TensorDict({"state": state}, (2, 6, agents))
    strategy.update(data)
    for agent in range(agents):
        alone, part = FACTORIES[name]((2,)), data.clone()
        for key in ("greedy_return", "uniform_return", "value_change", "epsilon"):
            part[key] = part[key][..., agent]
        part["state"] = state[..., agent]
        alone.update(part)
        assert torch.equal(strategy.eps[:, agent], alone.eps)
        now = alone.epsilon(part[:, 0])
        assert torch.equal(strategy.epsilon(data[:, 0])[:, agent], now)


@pytest.mark.parametrize("name", FACTORIES)
def test_per_agent_epsilons_act_per_agent(name):
    strategy = FACTORIES[name]((*RUNS, AGENTS))
    td = exploring(strategy, nested=True)(observed(RUNS, nested=True))
    expected = strategy.epsilon(td).float()
    assert torch.equal(td["agents", "epsilon"], expected)
    assert expected.shape == (*RUNS, AGENTS)


# Schedules and VDBE, by hand.


def test_constant_epsilon_never_moves():
    strategy = ConstantEpsilon([0.1, 0.9], batch_shape=[2])
    strategy.update(transitions((2, 9)))
    strategy.step(100)
    assert strategy.eps.tolist() == [0.1, 0.9]


@pytest.mark.parametrize(
    ("make", "formula"),
    [
        (lambda s: GeometricEpsilon(0.5, 0.9, batch_shape=s), lambda k: 0.5 * 0.9**k),
        (lambda s: PowerEpsilon(0.5, 1.5, batch_shape=s), lambda k: 0.5 * (k + 1) ** -1.5),
        (
            lambda s: PowerEpsilon(0.5, 1.5, first_index=0, batch_shape=s),
            lambda k: 0.5 * max(k, 1) ** -1.5,
        ),
    ],
    ids=["geometric", "power", "power-published"],
)
def test_schedules_count_finished_episodes_per_run(make, formula):
    strategy = make(RUNS)
    data = transitions((*RUNS, 20))
    strategy.update(data)
    ended = data["next", "done"].sum((1, 2)).tolist()
    assert len(set(ended)) > 1
    assert strategy.eps.tolist() == pytest.approx([formula(k) for k in ended])


@pytest.mark.parametrize("frames", [1, 37, 100, 250])
def test_linear_epsilon_is_torchrls_own(frames):
    theirs = EGreedyModule(action_spec(False), 0.9, 0.2, annealing_num_steps=100)
    theirs.step(frames)
    by_step = LinearEpsilon(0.9, 0.2, 100, count_by="step")
    by_step.step(frames)
    by_step.update(transitions((frames,)))
    by_update = LinearEpsilon(0.9, 0.2, 100)
    by_update.update(transitions((frames,)))
    by_update.step(frames)
    for ours in (by_step, by_update):
        assert float(ours.eps) == pytest.approx(float(theirs.eps), abs=1e-5)


def test_vdbe_moves_the_state_being_left():
    strategy = VDBEEpsilon(3, sigma=2.0, delta=0.25, initial=0.5)
    step = transitions(()).set("state", torch.tensor(1)).set("value_change", torch.tensor(-1.0))
    strategy.update(step)
    ratio = math.exp(-0.5)
    moved = 0.25 * (1 - ratio) / (1 + ratio) + 0.75 * 0.5
    assert strategy.epsilons.tolist() == pytest.approx([0.5, moved, 0.5])
    assert float(strategy.eps) == pytest.approx((1 + moved) / 3)
    assert float(strategy.epsilon(step)) == pytest.approx(moved)


# Stacking.


def test_a_stack_is_its_members_side_by_side():
    stack, members = stacked((6,)), stacked((6,)).strategies
    data = transitions((6, 10))
    stack.update(data)
    start = 0
    for member in members:
        runs = slice(start, start + member.batch_shape[0])
        member.update(data[runs])
        assert torch.equal(stack.eps[runs], member.eps)
        assert torch.equal(stack.epsilon(data[:, 0])[runs], member.epsilon(data[runs, 0]))
        start = runs.stop
    assert start == 6


def test_a_stack_passes_frames_on():
    stack = StackedEpsilon(
        [
            LinearEpsilon(1.0, 0.0, 10, count_by="step", batch_shape=[1]),
            ConstantEpsilon(0.5, batch_shape=[1]),
        ]
    )
    stack.step(4)
    assert stack.eps.tolist() == pytest.approx([0.6, 0.5])
    assert not stack.needs_update


class Halving(EpsilonStrategy):
    """What a user writes: two verbs and a buffer."""

    def __init__(self, shape):
        super().__init__(shape)
        self.in_keys = []
        self.register_buffer("value", torch.ones(shape, dtype=torch.float64))

    @property
    def eps(self):
        return self.value

    def epsilon(self, tensordict):
        return self.value

    def update(self, transition):
        self.value /= 2


def test_a_users_own_strategy_works_alone_and_stacked():
    alone = exploring(Halving(RUNS))
    stack = exploring(StackedEpsilon([Halving([1]), ConstantEpsilon(0.3, batch_shape=[3])]))
    for explore in (alone, stack):
        explore.update(transitions(RUNS))
        explore.update(transitions(RUNS))
    assert alone.eps.tolist() == [0.25] * 4
    assert stack.eps.tolist() == [0.25, 0.3, 0.3, 0.3]
    torch.testing.assert_close(stack(observed(RUNS))["epsilon"], stack.eps.float())


# Warnings.


@pytest.mark.parametrize(("alpha0", "beta0"), [(1.0, 1.0), (2.0, 1.0), ([1.0, 3.0], 2.0)])
def test_a_prior_above_one_half_warns(alpha0, beta0):
    with pytest.warns(UserWarning, match="Theorem 1 does not hold") as caught:
        BMCEpsilon(alpha0, beta0, batch_shape=[2])
    assert caught[0].filename == __file__


def test_a_prior_below_one_half_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        BMCEpsilon([1.0, 2.0], [1.01, 2.01], batch_shape=[2])


def test_epsilon_above_one_half_is_allowed_and_may_rise():
    with pytest.warns(UserWarning, match="may rise"):
        strategy = BMCEpsilon(3.0, 1.0)
    strategy.update(transitions((200,)))
    assert float(strategy.eps) > 0.75


def test_the_running_variance_needs_two_different_returns():
    strategy = BMCEpsilon(likelihood=GaussianLikelihood())
    step = transitions(())
    strategy.update(step)
    assert float(strategy.eps) == pytest.approx(1 / 2.01)
    assert float(strategy.log_evidence_ratio) == 0
    strategy.update(transitions(()))
    assert float(strategy.eps) < 1 / 2.01
