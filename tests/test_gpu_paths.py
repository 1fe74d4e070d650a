"""Every hot path as a GPU would run it: on a device without kernels here, on CUDA where it is.

What is traced stays on the device, never makes the host wait, and can be captured in a CUDA graph.
docs/gpu.md says what this proves and what it does not.
"""

import copy
import os
import subprocess
import sys

import pytest
import torch
from contracts import ACTIONS, FACTORIES, REPLACEMENTS, RUNS, exploring, observed, transitions
from fake_accelerator import (
    HostSyncs,
    fake_accelerator,
    lookalike,
    rewritten,
    traced,
    what_a_gpu_would_mind,
)
from jobs import EXPERIMENTS, settings
from lockstep_reference import DOMAINS, make_dqn, make_tabular
from tensordict import TensorDict
from tensordict.nn import CudaGraphModule
from torch import nn
from torchrl.data import Categorical
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import QValueActor

from bmc_torchrl import AdaptiveEGreedyModule, ConstantEpsilon, OneStepReturns
from bmc_torchrl.experiments import train
from bmc_torchrl.learners.q_learning import Experience, QLearning
from bmc_torchrl.learners.ring import Priorities
from bmc_torchrl.learners.values import QNetwork
from bmc_torchrl.strategies import StrategyBank, bmc, vdbe
from bmc_torchrl.training.compiled_steps import CompiledSteps, Seen, unwrapped_step
from bmc_torchrl.training.episodes import EpisodeLog
from bmc_torchrl.training.online import OnlineLearning

LAYOUTS = {
    "plain": {},
    "everything": {"one_hot": True, "masked": True, "nested": True},
    "softmax": {"masked": True, "explore": "softmax"},
    "zeta": {"masked": True, "one_hot": True, "explore": "zeta"},
}
ON_DEVICE = [name for name in FACTORIES if name not in ("plain", "apex")]
"""Strategies that have buffers, and so are somewhere."""

each_strategy = pytest.mark.parametrize("name", ON_DEVICE)
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture
def _walks_by_operators(monkeypatch):
    """As on CUDA, where there is a kernel."""
    for module in (bmc, vdbe):
        monkeypatch.setattr(module, "can_walk", lambda column: len(column) > 1)


def explorer(name, layout, batch=RUNS):
    """A module, and what it acts on."""
    kinds = {key: value for key, value in LAYOUTS[layout].items() if key != "explore"}
    return exploring(FACTORIES[name](RUNS), **LAYOUTS[layout]), observed(batch, **kinds)


def q_actor() -> QValueActor:
    return QValueActor(nn.Linear(3, ACTIONS), in_keys=["observation"], action_space="categorical")


def collected(batch) -> TensorDict:
    data = transitions(batch).exclude("greedy_return", "uniform_return")
    data["next", "observation"] = torch.randn(*batch, 3)
    data["collector"] = TensorDict({"mask": torch.ones(batch, dtype=torch.bool)}, batch)
    return data


def named_inputs(inputs, *modules) -> dict[int, str]:
    """Which of `inputs` are buffers or parameters of the modules, and their names."""
    names = {
        id(x): name for m in modules for name, x in (*m.named_buffers(), *m.named_parameters())
    }
    return {i: names[id(x)] for i, x in enumerate(inputs) if id(x) in names}


@each_strategy
@each_layout
def test_acting_can_be_captured_and_rewrites_no_input(name, layout):
    things = explorer(name, layout)
    with fake_accelerator() as device, torch.no_grad():
        (explore, td), inputs = lookalike(things, device)
        before = dict(td.items(True, True))
        graph = traced(lambda: [explore(td)[key] for key in explore.out_keys], inputs)
    assert what_a_gpu_would_mind(graph) == []
    # The action is read and written: CudaGraphModule copies what the graph read, and takes over
    # the out-keys alone.
    assert rewritten(graph) == set()
    changed = [key for key, value in td.items(True, True) if before.get(key) is not value]
    assert set(changed) == set(explore.out_keys)


@each_strategy
def test_greedy_acting_can_be_captured(name):
    things = explorer(name, "plain")
    with (
        fake_accelerator() as device,
        torch.no_grad(),
        set_exploration_type(ExplorationType.DETERMINISTIC),
    ):
        (explore, td), inputs = lookalike(things, device)
        graph = traced(lambda: [explore(td)[key] for key in explore.out_keys], inputs)
    assert what_a_gpu_would_mind(graph) == []
    assert rewritten(graph) == set()


WALKING = ("vdbe", "bmc", "bmc-free", "bmc-state", "bmc-offline")


@pytest.mark.usefixtures("_walks_by_operators")
@each_strategy
@pytest.mark.parametrize("time", [(), (3,)])
def test_returns_and_updates_can_be_captured_and_rewrite_buffers_alone(name, time):
    explore, returns = exploring(FACTORIES[name](RUNS)), OneStepReturns(q_actor(), 0.9)
    things = explore, returns, collected((*RUNS, *time))
    with fake_accelerator() as device, torch.no_grad():
        (explore, returns, data), inputs = lookalike(things, device)
        graph = traced(lambda: (explore.update(returns(data)), explore.step(3))[0], inputs)
    assert what_a_gpu_would_mind(graph) == []
    written = rewritten(graph)
    assert written <= named_inputs(inputs, explore).keys()
    assert bool(written) == (name != "constant")
    walks = [node for node in graph.graph.nodes if "_walk" in str(node.target)]
    own = {"stacked": 3, **dict.fromkeys(WALKING, 1)}
    assert len(walks) == (own.get(name, 0) if time else 0)


@pytest.mark.usefixtures("_walks_by_operators")
@pytest.mark.parametrize("time", [(), (3,)])
def test_a_what_if_bank_can_be_captured_and_rewrites_its_buffers_alone(time):
    names = ("bmc", "bmc-free", "vdbe", "power", "wins")
    bank = StrategyBank({name: FACTORIES[name](()) for name in names}, RUNS)
    with fake_accelerator() as device, torch.no_grad():
        (bank, data), inputs = lookalike((bank, transitions((*RUNS, *time))), device)
        graph = traced(lambda: (bank.update(data), list(bank.epsilons().values()))[1], inputs)
    assert what_a_gpu_would_mind(graph) == []
    assert rewritten(graph) <= named_inputs(inputs, bank).keys()


def test_a_strategy_without_buffers_is_somewhere_else():
    things = explorer("plain", "plain")
    with fake_accelerator() as device, torch.no_grad():
        (explore, td), inputs = lookalike(things, device)
        graph = traced(lambda: explore(td)["action"], inputs)
    assert what_a_gpu_would_mind(graph) == [f"devices ['cpu', '{device}']"]


ENGINES = {"sarsa": make_tabular, "dqn": make_dqn}


@pytest.mark.parametrize("learner", ENGINES)
@pytest.mark.parametrize(
    ("domain", "strategy"), [*((domain, "bmc") for domain in DOMAINS), ("grid", "stacked")]
)
def test_a_lockstep_step_can_be_captured(learner, domain, strategy):
    engine = ENGINES[learner](domain, strategy)
    engine.advance(8)
    draws, time = engine.draw(1), engine.time
    with fake_accelerator() as device, torch.no_grad():
        (engine, draws), inputs = lookalike((engine, draws), device)
        arguments = (draws, time) if learner == "dqn" else (draws,)
        graph = traced(lambda: engine.vector_steps(*arguments), inputs)
    assert what_a_gpu_would_mind(graph) == []
    drawn = {id(x) for x in (draws.act, *draws.noise)}
    assert not {id(inputs[i]) for i in rewritten(graph)} & drawn


@pytest.mark.parametrize("learner", ENGINES)
@pytest.mark.parametrize("domain", DOMAINS)
def test_a_step_of_greedy_tests_can_be_captured(learner, domain):
    engine = ENGINES[learner](domain, "constant", tests=2)
    tests = engine._greedy
    noise = engine.domain.transition_noise(
        engine.domain.draw_transition((1, *tests.shape), engine.generator)
    )
    with fake_accelerator() as device, torch.no_grad():
        (engine, noise), inputs = lookalike((engine, noise), device)
        tests = engine._greedy
        graph = traced(lambda: tests.advance(tests.policy, tests.rollout, noise), inputs)
    assert what_a_gpu_would_mind(graph) == []
    assert rewritten(graph) == set()


def experience(runs: int) -> Experience:
    ended = torch.zeros(runs, dtype=torch.bool)
    before, after = torch.randn(2, runs, 3)
    action = torch.zeros(runs, dtype=torch.int64)
    return Experience(before, action, torch.randn(runs), after, ended, ended.clone())


LEARNING = {
    "dqn": {},
    "double": {"target": "double_dqn", "n_steps": 3},
    "expected sarsa": {"target": "expected_sarsa", "target_tau": None},
    "prioritised": {"priorities": Priorities()},
}


@pytest.mark.slow
def test_learning_steps_can_be_captured_in_a_process_of_their_own():
    """Autograd knows the devices that were there at its first backward pass, and no later ones."""
    which = "a_learning_step or a_whole_update"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-k", which, __file__]
    done = subprocess.run(
        command, env={**os.environ, "BMC_FRESH": "1"}, capture_output=True, text=True, check=False
    )
    assert f"{2 * len(LEARNING) + 3 * len(REPLACEMENTS)} passed" in done.stdout, done.stdout


in_a_fresh_process = pytest.mark.skipif(
    "BMC_FRESH" not in os.environ, reason="runs in a process of its own"
)


@in_a_fresh_process
@pytest.mark.parametrize("runs", [None, 4])
@pytest.mark.parametrize("options", list(LEARNING.values()), ids=list(LEARNING))
def test_a_learning_step_can_be_captured(runs, options):
    network = q_actor().module[0] if runs is None else QNetwork(3, ACTIONS, (5,), runs=runs)
    learning = QLearning(network, 0.9, runs=runs, batch_size=4, capacity=8, **options)
    epsilon = torch.full([runs or 1], 0.3)
    for _ in range(8):
        learning.add(experience(runs or 1))
    things = learning, experience(runs or 1), epsilon
    with fake_accelerator() as device:
        (learning, seen, epsilon), inputs = lookalike(things, device)
        optimizer = torch.optim.Adam(learning.network.parameters(), capturable=True)

        def step():
            learning.add(seen)
            batch = learning.sample()
            loss, error = learning.loss(batch, epsilon)
            optimizer.zero_grad()
            loss.sum().backward()
            optimizer.step()
            learning.after_step(batch, error)

        step()
        inputs += [x for state in optimizer.state.values() for x in state.values()]
        graph = traced(step, inputs)
    assert what_a_gpu_would_mind(graph) == []


@in_a_fresh_process
@pytest.mark.parametrize("name", ["bmc", "vdbe", "wins"])
@pytest.mark.parametrize("replacement", REPLACEMENTS)
def test_a_whole_update_of_the_training_module_can_be_captured(name, replacement):
    """All that EpsilonGreedyDQN does between two steps of the environments."""
    runs = RUNS[0]
    network = QNetwork(3, ACTIONS, (5,), runs=runs)
    learning = QLearning(network, 0.9, runs=runs, batch_size=4, capacity=8)
    for _ in range(8):
        learning.add(experience(runs))
    online = OnlineLearning(
        network,
        FACTORIES[name](RUNS),
        learning,
        interaction=None,
        log=EpisodeLog(runs, episodes=None),
        num_actions=ACTIONS,
        replacement=REPLACEMENTS[replacement](),
        gamma=0.9,
    )
    bank = StrategyBank({"bmc": FACTORIES["bmc"](())}, RUNS)
    online.watch(bank)
    state, legal = torch.zeros(runs, dtype=torch.int64), torch.ones(runs, ACTIONS).bool()
    seen = Seen(
        experience=experience(runs),
        value=torch.randn(runs, ACTIONS),
        mask_left=legal,
        state=state,
        reached=state.clone(),
        observation=torch.randn(runs, 3),
        mask=legal.clone(),
        state_now=state.clone(),
        active=None,
        draws=learning.draws(),
        coins=online.coins(torch.device("cpu")),
    )
    # What it holds is copied as numbers, which a fake has none of: it starts over there.
    online.replacement = REPLACEMENTS[replacement]()
    things = CompiledSteps(online, runs, max_grad_norm=1.0), seen
    with fake_accelerator() as device:
        (steps, seen), inputs = lookalike(things, device)
        steps.online.replacement.start(RUNS)
        inputs += getattr(steps.online.replacement, "memory", ())
        optimizer = torch.optim.Adam(steps.parameters.values(), capturable=True)
        for key, parameter in steps.parameters.items():
            parameter.grad = steps.gradients[key]
        steps.traced = optimizer
        with torch.no_grad():
            unwrapped_step(optimizer)
            inputs += [x for memory in optimizer.state.values() for x in memory.values()]
            graph = traced(lambda: steps._whole(seen), inputs)
    assert what_a_gpu_would_mind(graph) == []
    given = {id(x) for x in (*seen.experience.columns(), seen.value, seen.observation, seen.coins)}
    assert not {id(inputs[i]) for i in rewritten(graph)} & given


def test_what_a_gpu_would_mind_is_found():
    with fake_accelerator() as device:
        on, off = torch.ones(3, device=device), torch.ones(3)
        with pytest.raises(RuntimeError, match="_local_scalar_dense"):
            bool(on.any())
        with pytest.raises(RuntimeError, match="nonzero"):
            on[on > 0]
        bad = {
            "multinomial": lambda: on.multinomial(2),
            "randperm": lambda: torch.randperm(3, device=device),
            "devices": lambda: on + off.to(device),
        }
        found = {name: what_a_gpu_would_mind(traced(work, [on, off])) for name, work in bad.items()}
        assert rewritten(traced(lambda: on.view(-1).add_(1), [off, on])) == {1}
    for name, minds in found.items():
        assert any(name in mind for mind in minds), name


def test_the_counter_sees_what_egreedy_would_cost():
    with HostSyncs() as syncs:
        bool(torch.ones(2).any())
        torch.arange(3)[torch.tensor([True, False, True])]
    assert len(syncs.seen) >= 2


@pytest.mark.gpu
@each_strategy
@each_layout
def test_a_gpu_acts_and_learns_like_a_cpu(name, layout):
    here, td = explorer(name, layout)
    there = copy.deepcopy(here).cuda()
    data = transitions((*RUNS, 5))
    for _ in range(2):
        acted = there(td.cuda())
        assert acted[there.out_keys[0]].is_cuda
        here.update(data)
        there.update(data.cuda())
    torch.testing.assert_close(there.eps.cpu(), here.eps, rtol=1e-9, atol=0)


@pytest.mark.gpu
@each_strategy
def test_a_gpu_is_never_waited_for(name):
    explore = exploring(FACTORIES[name](RUNS)).cuda()
    td, data = observed(RUNS).cuda(), transitions((*RUNS, 5)).cuda()
    explore(td)
    explore.update(data)
    torch.cuda.set_sync_debug_mode("error")
    try:
        explore(td)
        explore.update(data)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_device_argument_and_to_move_everything():
    explore = AdaptiveEGreedyModule(Categorical(4), ConstantEpsilon(0.5), device="cuda")
    td = TensorDict({"action": torch.zeros(10, dtype=torch.int64, device="cuda")}, [10])
    assert explore(td)["epsilon"].is_cuda


@pytest.mark.gpu
def test_coins_differ_between_replays_of_a_captured_graph():
    explore = AdaptiveEGreedyModule(Categorical(4), ConstantEpsilon(0.5), device="cuda")
    act = CudaGraphModule(explore)
    action = torch.zeros(1000, dtype=torch.int64, device="cuda")
    acted = [act(TensorDict({"action": action}, [1000]))["action"].clone() for _ in range(6)]
    assert all(not a.equal(b) for i, a in enumerate(acted) for b in acted[:i])
    shares = torch.stack([(a != 0).float().mean() for a in acted])
    torch.testing.assert_close(shares.cpu(), torch.full([6], 0.375), rtol=0, atol=0.08)


@pytest.mark.gpu
def test_a_captured_graph_acts_on_the_action_that_it_is_given():
    explore = AdaptiveEGreedyModule(Categorical(4), ConstantEpsilon(0.0), device="cuda")
    act = CudaGraphModule(explore)
    for number in range(6):
        action = torch.full([10], number % 4, device="cuda")
        assert act(TensorDict({"action": action.clone()}, [10]))["action"].equal(action)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_two_minutes_of_every_experiment_on_a_gpu(experiment, tmp_path):
    job = [f"experiment={experiment}", "device=cuda", "engine=lockstep", "runs=100", "logger=none"]
    cfg = settings(*job, f"output={tmp_path}", "+trainer.lightning.max_time=00:00:02:00")
    train.check_settings(cfg)
    module, *rest = train.build_job(cfg)
    train.fit(cfg, module, *rest)
    engine = module.engine
    assert engine.device.type == "cuda"
    assert engine.time > 0
    assert engine.epsilons[:, 0].isfinite().all()
    assert engine.strategy.eps.is_cuda
