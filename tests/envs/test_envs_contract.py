"""What all environments promise to TorchRL and to the device; a new domain adds one row."""

import warnings

import pytest
import torch
from fake_accelerator import HostSyncs, fake_accelerator, lookalike
from torchrl.envs import SerialEnv
from torchrl.envs.utils import check_env_specs

from bmc_torchrl.envs import (
    CartPoleEnv,
    SubgoalGridEnv,
    SupplyChainEnv,
    SupplyNetwork,
    TabularEnv,
    cart_pole_bins,
    cart_pole_step,
    garnet,
    subgoal_grid_step,
    supply_chain_step,
    tabular_step,
)
from bmc_torchrl.envs.tabular import task_of
from bmc_torchrl.envs.uniforms import uniform

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # TorchRL warns about a class of its own.
    from torchrl.collectors import Collector

FIRST, SECOND = (garnet(20, 3, 4, seed=seed) for seed in (0, 1))


def finite(**options):
    return TabularEnv(FIRST, **options)


def switching(**options):
    return TabularEnv(FIRST, after=SECOND, switch_at=1, **options)


DOMAINS = [SubgoalGridEnv, CartPoleEnv, SupplyChainEnv, finite, switching]
OBSERVATIONS = ["state", "encoded"]
every_domain = pytest.mark.parametrize("domain", DOMAINS)
every_observation = pytest.mark.parametrize("observation", OBSERVATIONS)


def two_warehouses(**options):
    small = SupplyNetwork(demand_rate=(1.0, 2.0), capacity=(8,), initial_stocks=(4, 0, 1))
    return SupplyChainEnv(small, **options)


@pytest.mark.parametrize("domain", [*DOMAINS, two_warehouses])
@every_observation
@pytest.mark.parametrize("batch_size", [(), (1,), (3,), (2, 3)])
@pytest.mark.parametrize("one_hot_actions", [False, True])
def test_specs_hold(domain, observation, batch_size, one_hot_actions):
    env = domain(observation=observation, batch_size=batch_size, one_hot_actions=one_hot_actions)
    check_env_specs(env)
    assert env.batch_size == batch_size


@every_domain
@every_observation
def test_tables_that_can_be_computed_are_in_no_checkpoint(domain, observation):
    assert not domain(observation=observation).state_dict()


@every_domain
def test_one_hot_actions_do_what_their_index_does(domain):
    plain, one_hot = domain(batch_size=[64]), domain(batch_size=[64], one_hot_actions=True)
    start = plain.reset()
    action = plain.action_spec.rand()
    encoded = torch.nn.functional.one_hot(action, plain.num_actions).bool()
    plain.set_seed(5)
    expected = plain.step(start.clone().set("action", action))["next"]
    one_hot.set_seed(5)
    got = one_hot.step(start.clone().set("action", encoded))["next"]
    assert (got == expected).all()


@every_domain
def test_the_same_seed_gives_the_same_rollout(domain):
    env = domain(batch_size=[5], observation="encoded")
    env.set_seed(1)
    first = env.rollout(50, break_when_any_done=False)
    env.set_seed(1)
    assert (env.rollout(50, break_when_any_done=False) == first).all()
    env.set_seed(2)
    assert not (env.rollout(50, break_when_any_done=False) == first).all()


def random_arguments(shape):
    grid = torch.randint(150, shape), torch.randint(4, shape)
    cart = torch.randn(*shape, 4), torch.randint(2, shape)
    stocks, demand = torch.randint(51, (*shape, 2)), torch.randint(9, (*shape, 1))
    supply = stocks, torch.randint(100, shape), demand
    draws = torch.rand(shape, dtype=torch.float64)
    table = torch.randint(20, shape), torch.randint(3, shape), draws
    return grid, cart, supply, table


def first_step(*arguments):
    return tabular_step(*arguments, task_of([FIRST]))


@pytest.mark.parametrize("shape", [(7,), (3, 5)])
def test_a_batch_steps_like_its_members_alone(shape):
    torch.manual_seed(0)
    grid, cart, supply, table = random_arguments(shape)
    for step, arguments in (
        (subgoal_grid_step, grid),
        (cart_pole_step, cart),
        (supply_chain_step, supply),
        (first_step, table),
    ):
        together = step(*arguments)
        for at in torch.cartesian_prod(*map(torch.arange, shape)).reshape(-1, len(shape)):
            alone = step(*(argument[tuple(at)] for argument in arguments))
            for whole, single in zip(together, alone, strict=True):
                torch.testing.assert_close(whole[tuple(at)], single, atol=1e-6, rtol=1e-6)


@every_domain
@every_observation
def test_finished_copies_start_again_and_the_others_go_on(domain, observation):
    env = domain(batch_size=[4], observation=observation, max_steps=3)
    tensordict = env.reset()
    tensordict["step_count"] = torch.tensor([[2], [0], [2], [1]])
    tensordict["action"] = env.action_spec.rand()
    stepped, following = env.step_and_maybe_reset(tensordict)
    truncated = torch.tensor([[True], [False], [True], [False]])
    assert torch.equal(stepped["next", "truncated"], truncated)
    assert torch.equal(stepped["next", "done"], truncated)
    assert not stepped["next", "terminated"].any()
    assert following["step_count"].flatten().tolist() == [0, 1, 0, 2]
    assert not following["done"].any()
    for key in env.observation_spec:
        assert torch.equal(following[key][1], stepped["next", key][1])
    start = env.reset()
    if domain is not CartPoleEnv:
        assert torch.equal(following["state"][0], start["state"][0])
    else:
        assert following["physics"][0].abs().max() <= 0.05
        assert torch.equal(following["state"], cart_pole_bins(following["physics"]))


@every_domain
def test_termination_is_not_truncation(domain):
    env = domain(batch_size=[500], max_steps=30)
    env.set_seed(0)
    steps = env.rollout(60, break_when_any_done=False)["next"]
    assert torch.equal(steps["done"], steps["terminated"] | steps["truncated"])
    assert not (steps["terminated"] & steps["truncated"]).any()
    assert steps["truncated"].any()
    assert steps["terminated"].any() == (domain is CartPoleEnv)
    assert steps["step_count"].max() == 30


@every_domain
def test_without_a_limit_nothing_is_truncated(domain):
    steps = domain(batch_size=[3], max_steps=None).rollout(250, break_when_any_done=False)["next"]
    assert not steps["truncated"].any()


@every_domain
def test_a_partial_reset_leaves_the_others_alone(domain):
    env = domain(batch_size=[4], observation="encoded")
    last = env.rollout(5, break_when_any_done=False)[:, -1]["next"].exclude("reward")
    mask = torch.tensor([[True], [False], [False], [True]])
    after = env.reset(last.clone().set("_reset", mask))
    assert torch.equal(after["step_count"].flatten() == 0, mask.flatten())
    kept = ~mask.flatten()
    for key in env.observation_spec:
        assert torch.equal(after[key][kept], last[key][kept])


@every_domain
@every_observation
def test_an_episode_can_start_from_given_states(domain, observation):
    env = domain(batch_size=[6], observation=observation)
    later = env.rollout(4, break_when_any_done=False)[:, -1]["next"].exclude("reward")
    start = env.reset(later.clone(), set_state=True)
    for key in set(env.observation_spec) - {"step_count"}:
        assert torch.equal(start[key], later[key])
    assert (start["step_count"] == 0).all()


@pytest.mark.parametrize("domain", [SubgoalGridEnv, SupplyChainEnv, switching])
def test_states_that_do_not_exist_cannot_be_reset_to(domain):
    env = domain(batch_size=[2])
    for wrong in (-1, env.num_states):
        with pytest.raises(ValueError, match=r'"state" must be in \[0'):
            env.reset(env.reset().set("state", torch.tensor([0, wrong])), set_state=True)


@every_domain
def test_two_of_them_run_in_a_serial_env(domain):
    env = SerialEnv(2, lambda: domain(batch_size=[3], max_steps=4))
    counts = env.rollout(6, break_when_any_done=False)["next", "step_count"]
    assert counts.shape == (2, 3, 6, 1)
    assert counts.amax() <= 4


@every_domain
@every_observation
def test_collecting_never_makes_the_host_wait(domain, observation):
    env = domain(batch_size=[8], observation=observation, max_steps=3)

    def policy(tensordict):
        return tensordict.set("action", torch.zeros(8, dtype=torch.int64))

    collector = Collector(env, policy, frames_per_batch=80, total_frames=800, track_traj_ids=False)
    batches = iter(collector)
    next(batches)
    with HostSyncs() as syncs:
        batch = next(batches)
    collector.shutdown()
    assert batch["next", "done"].any()
    assert syncs.seen == []


def test_the_counter_notices_waiting():
    with HostSyncs() as syncs:
        flags = torch.tensor([True, False])
        bool(flags.any())
        torch.arange(2)[flags]
        flags.nonzero()
    assert len(syncs.seen) >= 3


@every_domain
@every_observation
def test_a_fake_accelerator_steps_and_resets(domain, observation):
    given = domain(batch_size=[4], observation=observation)
    with fake_accelerator() as device:
        if isinstance(given, TabularEnv):
            env, _ = lookalike(given, device)  # Its tables are numbers from outside.
        else:
            env = domain(batch_size=[4], observation=observation, device=device)
        tensordict = env._reset(None)  # reset itself checks that nothing is done: a host sync
        for _ in range(3):
            action = torch.zeros(4, dtype=torch.int64, device=device)
            stepped, tensordict = env.step_and_maybe_reset(tensordict.set("action", action))
        assert {leaf.device for leaf in stepped.values(True, True)} == {device}
        assert {leaf.device for leaf in tensordict.values(True, True)} == {device}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_inductor_draws_the_numbers_of_the_eager_environment():
    def two_draws():
        shape, device = (4, 3), torch.device("cpu")
        return uniform(shape, torch.float64, device), uniform(shape, torch.float64, device)

    torch.manual_seed(7)
    expected = two_draws()
    torch.manual_seed(7)
    got = torch.compile(two_draws, fullgraph=True)()
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    assert not torch.equal(got[0], got[1])


@pytest.mark.slow
@every_domain
@every_observation
def test_a_compiled_step_has_one_graph_and_the_same_trajectory(domain, observation):
    torch.compiler.reset()
    options = {"batch_size": [16], "observation": observation, "max_steps": 5}
    eager, compiled = domain(**options), domain(**options)
    compiled.compile(fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    carriers = [eager.reset()] * 2
    actions = [eager.action_spec.rand() for _ in range(12)]
    trajectories = []
    for env, carrier in zip((eager, compiled), carriers, strict=True):
        env.set_seed(4)
        steps, carrier = [], carrier.clone()
        for action in actions:
            stepped, carrier = env.step_and_maybe_reset(carrier.set("action", action))
            steps.append(stepped)
        trajectories.append(torch.stack(steps, -1))
    torch.testing.assert_close(*(t.to_dict() for t in trajectories))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_inductor_compiles_every_pure_step_whole():
    given, task = random_arguments((33,)), task_of([FIRST])

    def all_four(grid, cart, supply, table):
        moves = subgoal_grid_step(*grid), cart_pole_step(*cart), supply_chain_step(*supply)
        return *moves, tabular_step(*table, task)

    compiled = torch.compile(all_four, fullgraph=True)(*given)
    expected = all_four(*given)
    for got, want in zip(compiled, expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@every_domain
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch_size": [0]}, "batch_size must hold positive sizes"),
        ({"batch_size": [3, -1]}, "batch_size must hold positive sizes"),
        ({"device": "no_such_device"}, "device='no_such_device' cannot be used"),
        ({"observation": "pixels"}, 'observation must be "state" or "encoded"'),
        ({"max_steps": 0}, "max_steps must be at least 1"),
    ],
)
def test_bad_arguments_are_refused_by_name(domain, arguments, words):
    with pytest.raises(ValueError, match=words):
        domain(**arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
@every_domain
def test_an_absent_device_is_refused_by_name(domain):
    with pytest.raises(ValueError, match="device='cuda:3' cannot be used here"):
        domain(device="cuda:3")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@every_domain
def test_specs_hold_on_a_gpu(domain):
    check_env_specs(domain(batch_size=[5], observation="encoded", device="cuda"))
