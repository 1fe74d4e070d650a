"""Others' environments: the same steps as TorchRL's wrapper, and one command trains each."""

from __future__ import annotations

import importlib
from collections import deque
from functools import partial
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from commands import here
from hydra.utils import instantiate
from interruptions import interrupted
from jobs import FOREIGN, TABULAR, assert_identical, built, everything, settings, trained
from tensordict import TensorDict
from torchrl.envs import GymWrapper
from torchrl.envs.utils import check_env_specs

from bmc_torchrl.analysis.job_summary import print_job_summary
from bmc_torchrl.analysis.tables import load
from bmc_torchrl.envs.gymnasium_batch import INSTALL, DmEnv, GymBatchEnv, bsuite_env, gym_env
from bmc_torchrl.training.callbacks import GreedyEvaluation
from bmc_torchrl.training.episodes import EpisodeLog
from bmc_torchrl.training.greedy_tests import greedy_tests
from bmc_torchrl.training.optimizers import clip_each_run

for module in ("minatar", "minigrid", "bsuite", "Box2D"):
    pytest.importorskip(module, reason=INSTALL)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*pkg_resources.*"),
]

LAKE = partial(gym_env, "FrozenLake-v1")
SMALL = ["runs=2", "episodes=3", "device=cpu", "logger=none", "domain.max_steps=30"]


def tiny(experiment: str, *overrides: str) -> list[str]:
    chosen = [f"experiment={experiment}", *SMALL, "domain.tests=2", "domain.test_every=2"]
    if experiment.endswith("_dqn"):
        chosen += ["learner.batch_size=4", "learner.warmup=8", "learner.hidden=[8]"]
    return [*chosen, *overrides]


@pytest.mark.parametrize("name", ["CartPole-v1", "Acrobot-v1", "FrozenLake-v1", "Taxi-v4"])
def test_every_run_steps_as_torchrls_wrapper_does(name: str) -> None:
    env = GymBatchEnv(partial(gym_env, name), max_steps=12, batch_size=[3])
    env.set_seed(5)
    ours = env.reset()
    seeds = list(env.seeds)
    assert len(set(seeds)) == 3
    actions = torch.randint(env.num_actions, (20, 3))
    steps = []
    for action in actions:
        stepped, ours = env.step_and_maybe_reset(ours.set("action", action))
        steps.append(stepped)
    key = "state" if env.tabular else "observation"
    for run, seed in enumerate(seeds):
        theirs = GymWrapper(
            gymnasium.make(name, max_episode_steps=12), categorical_action_encoding=True
        )
        current = theirs.reset(seed=seed)
        for number, step in enumerate(steps):
            stepped = theirs.step(current.set("action", actions[number, run]))
            assert torch.equal(step["next", key][run], stepped["next", "observation"])
            for flag in ("reward", "done", "terminated", "truncated"):
                assert torch.equal(step["next", flag][run], stepped["next", flag])
            if bool(stepped["next", "done"]):
                break
            current = stepped["next"]


def test_a_seed_gives_the_same_episodes_again_and_every_episode_its_own() -> None:
    rollouts = []
    for seed in (3, 3, 4):
        env = GymBatchEnv(LAKE, max_steps=20, batch_size=[4])
        env.set_seed(seed)
        rollouts.append(env.rollout(40, break_when_any_done=False)["next", "state"])
    assert torch.equal(rollouts[0], rollouts[1])
    assert not torch.equal(rollouts[0], rollouts[2])
    assert len({tuple(run.tolist()) for run in rollouts[0]}) == 4


def test_the_limit_truncates_and_the_goal_terminates() -> None:
    env = GymBatchEnv(partial(LAKE, is_slippery=False), max_steps=6, batch_size=[2])
    current, ends = env.reset(), []
    for left, right in zip([0] * 6, [1, 1, 2, 1, 2, 2], strict=True):
        action = torch.tensor([left, right])
        stepped, current = env.step_and_maybe_reset(current.set("action", action))
        ends.append(stepped["next"])
    last = ends[-1]
    assert not any(bool(step["done"].any()) for step in ends[:-1])
    assert last["terminated"].squeeze(-1).tolist() == [False, True]
    assert last["truncated"].squeeze(-1).tolist() == [True, True]
    assert last["reward"].squeeze(-1).tolist() == [0.0, 1.0]
    assert current["state"].tolist() == [0, 0]
    assert not bool(current["done"].any())


def test_a_partial_step_leaves_the_other_copies_alone() -> None:
    env = GymBatchEnv(partial(gym_env, "CartPole-v1"), max_steps=50, batch_size=[3])
    current = env.reset().set("action", torch.ones(3, dtype=torch.int64))
    before = current["observation"].clone()
    current["_step"] = torch.tensor([True, False, True])
    following = env.step(current)["next"]
    changed = (following["observation"] != before).any(-1)
    assert changed.tolist() == [True, False, True]
    assert following["reward"].squeeze(-1).tolist() == [1.0, 0.0, 1.0]
    assert [len(taken) for taken in env.actions] == [1, 0, 1]


def test_a_test_steps_only_the_runs_it_is_of_until_their_episode_ends() -> None:
    env = GymBatchEnv(partial(gym_env, "CartPole-v1"), max_steps=40, batch_size=[3, 2])
    taken = []
    advance = env.advance
    env.advance = lambda row, action: taken.append(row) or advance(row, action)

    def left(current: TensorDict) -> TensorDict:
        return current.set("action", torch.zeros(3, 2, dtype=torch.int64))

    runs = torch.tensor([False, True, False])
    steps, returns = greedy_tests(env, left, gamma=1.0, max_steps=40, runs=runs, one_by_one=True)
    assert set(taken) == {2, 3}
    assert steps[1].tolist() == returns[1].tolist() == [taken.count(2), taken.count(3)]
    assert (steps[0] == 0).all()
    assert 7 < steps[1].min() < steps[1].max() + 1 < 15


class _Countdown:
    """A dm_env environment of `length` steps that ends with `discount`."""

    def __init__(self, length: int, discount: float) -> None:
        self.length, self.discount = length, discount

    def observation_spec(self):
        return SimpleNamespace(shape=(2, 2))

    def action_spec(self):
        return SimpleNamespace(num_values=3)

    def reset(self):
        self.left = self.length
        return SimpleNamespace(observation=np.zeros((2, 2)))

    def step(self, action: int):
        self.left -= 1
        over, seen = self.left == 0, np.full((2, 2), self.left)
        discount = self.discount if over else 1.0
        return SimpleNamespace(
            observation=seen, reward=float(action), discount=discount, last=lambda: over
        )


@pytest.mark.parametrize(("discount", "terminated"), [(0.0, True), (1.0, False)])
def test_a_dm_env_terminates_only_where_its_discount_is_zero(
    discount: float, terminated: bool
) -> None:
    env = GymBatchEnv(lambda: DmEnv(lambda seed: _Countdown(3, discount)), max_steps=9)
    current = env.reset()
    for number in range(3):
        current = env.step(current.set("action", torch.tensor(2)))["next"]
        assert float(current["reward"]) == 2.0
        assert bool(current["done"]) == (number == 2)
    assert bool(current["terminated"]) == terminated
    assert bool(current["truncated"]) == (not terminated)
    assert current["observation"].shape == (4,)


@pytest.mark.filterwarnings("ignore:Environment is in debug mode")
def test_deep_sea_pays_one_for_going_right_all_the_way() -> None:
    env = bsuite_env("deep_sea", size=4, randomize_actions=False)
    env.reset(seed=1)
    steps = [env.step(1) for _ in range(4)]
    assert [step[2] for step in steps] == [False, False, False, True]
    assert sum(step[1] for step in steps) == pytest.approx(1 - 0.01)


@pytest.mark.parametrize("experiment", FOREIGN)
def test_an_environment_is_as_specified_and_only_taxi_has_a_mask(experiment: str) -> None:
    cfg = settings(f"experiment={experiment}")
    env = instantiate(cfg.domain.env)(batch_size=[2])
    assert env.has_action_mask == (experiment == "taxi_sarsa")
    check_env_specs(env)


@pytest.mark.parametrize("experiment", TABULAR)
def test_no_episode_is_shorter_than_the_shortest(experiment: str) -> None:
    """Breadth first from every start through the environment's own transitions."""
    cfg = settings(f"experiment={experiment}")
    inner = instantiate(cfg.domain.env)(batch_size=[1]).copies[0].unwrapped
    starts = np.flatnonzero(inner.initial_state_distrib)
    distance = {int(state): 0 for state in starts}
    queue, shortest = deque(distance), None
    while queue and shortest is None:
        state = queue.popleft()
        for _, following, _, over in (way for ways in inner.P[state].values() for way in ways):
            if over:
                shortest = distance[state] + 1
            elif following not in distance:
                distance[following] = distance[state] + 1
                queue.append(following)
    assert cfg.domain.shortest_episode == shortest


@pytest.mark.parametrize("experiment", FOREIGN)
def test_every_experiment_trains(experiment: str, tmp_path) -> None:
    learner = trained(tmp_path, *tiny(experiment))
    table = load(tmp_path / "table.parquet")
    assert len(table) == 6
    assert (table["steps"] > 0).all()
    assert table["epsilon"].between(0, 1).all()
    log = learner.log_of_episodes
    assert (log.steps[:, 1] == log.steps[:, 2]).all()
    if experiment in TABULAR and experiment != "frozen8_sarsa" and experiment != "frozen4_sarsa":
        assert (learner.rule.table.weight != 0).any()
    assert (learner.strategy.eps < 0.4976).all()


def test_a_job_leaves_metrics_table_and_figure(tmp_path) -> None:
    trained(tmp_path, *tiny("frozen4_sarsa", "logger=csv"))
    print_job_summary(tmp_path)
    for name in ("metrics/metrics.csv", "table.parquet", "curves.png", "last.ckpt"):
        assert (tmp_path / name).stat().st_size > 0


@pytest.mark.parametrize("experiment", ["frozen4_sarsa", "cartpole_dqn"])
def test_an_interrupted_job_goes_on_as_if_it_had_not_been(experiment: str, tmp_path) -> None:
    job = tiny(experiment, "trainer.chunk_steps=2", "trainer.checkpoint_every_n_chunks=1")
    whole = trained(tmp_path / "whole", *job)
    interrupted(tmp_path / "cut", 2, *job)
    torch.manual_seed(99)
    resumed = trained(tmp_path / "cut", *job, "resume=true")
    assert_identical(everything(resumed), everything(whole))


def test_taxis_illegal_actions_are_never_taken_nor_averaged() -> None:
    job = tiny("taxi_sarsa", "strategies=[fixed_05,bmc]", "domain.max_steps=60")
    _, learner, stream, own = built(*job)
    illegal = 0
    for _, transition in zip(range(40), (step for chunk in stream for step in chunk), strict=False):
        mask, action = transition["action_mask"], transition["action"].unsqueeze(-1)
        assert mask.gather(-1, action).all()
        illegal += int((~mask).sum())
        with torch.no_grad():
            learner.rule.table.weight.add_(torch.randn_like(learner.rule.table.weight))
            value = learner.rule.table(transition["next", "state"])
        learner.step(transition)
        legal = transition["next", "action_mask"]
        mean = torch.where(legal, value, 0.0).sum(-1) / legal.sum(-1)
        alive = ~transition["next", "terminated"].squeeze(-1)
        expected = transition["next", "reward"].squeeze(-1) + 0.99 * mean * alive
        torch.testing.assert_close(transition["uniform_return"], expected)
    assert illegal > 0
    evaluation = next(part for part in own if isinstance(part, GreedyEvaluation))
    current = evaluation.env.reset()
    action = learner.q_actor(current)["action"].unsqueeze(-1)
    assert current["action_mask"].gather(-1, action).all()


def test_gradients_are_clipped_run_by_run() -> None:
    weight, alone = torch.nn.Parameter(torch.zeros(3, 2)), torch.nn.Parameter(torch.zeros(1, 2))
    weight.grad = torch.tensor([[3.0, 4.0], [0.3, 0.4], [300.0, 400.0]])
    alone.grad = torch.tensor([[3.0, 4.0]])
    clip_each_run([weight.grad], 1.0, runs=3)
    torch.nn.utils.clip_grad_norm_([alone], 1.0)
    torch.testing.assert_close(weight.grad[0], alone.grad[0])
    torch.testing.assert_close(weight.grad[1], torch.tensor([0.3, 0.4]))
    torch.testing.assert_close(weight.grad[2].norm(), torch.tensor(1.0))


def test_a_test_stands_for_the_episodes_since_the_one_before() -> None:
    log = EpisodeLog(runs=2, episodes=5, test_every=2)
    step = (torch.ones(2), torch.ones(2, dtype=torch.bool), torch.full((2,), 0.5), torch.zeros(2))
    due = []
    for episode in range(5):
        due.append(log.record(*step, {}))
        assert log.last_tested.tolist() == [[max(0, episode - 1 - (episode - 1) % 2)]] * 2
        if due[-1].all():
            log.write_tests(due[-1], torch.full((2,), float(episode)), torch.zeros(2))
    assert [bool(runs.all()) for runs in due] == [True, False, True, False, True]
    assert log.steps.tolist() == [[0.0, 2.0, 2.0, 4.0, 4.0]] * 2
    assert log.last_tested.tolist() == [[4], [4]]


def test_what_is_not_there_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"cannot make 'FrozenPond-v1'.*pip install -c"):
        gym_env("FrozenPond-v1")
    with pytest.raises(ValueError, match="use one of deep_sea, cartpole_swingup"):
        bsuite_env("catch")
    real = importlib.import_module

    def absent(name: str):
        if name.partition(".")[0] in ("minatar", "minigrid", "bsuite"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name)

    monkeypatch.setattr("bmc_torchrl.envs.gymnasium_batch.importlib.import_module", absent)
    for experiment in ("breakout_dqn", "empty_dqn", "deepsea_dqn"):
        with pytest.raises(ValueError, match=r"not installed .*pip install -c constraints.txt"):
            built(*tiny(experiment))


def test_the_command_refuses_a_bad_name_in_a_line(tmp_path, capsys) -> None:
    chosen = [*tiny("cartpole_dqn"), "domain.env.make.name=CartPool-v1"]
    assert here(tmp_path, "train", *chosen) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("bmc train: Gymnasium cannot make 'CartPool-v1'")
    assert line.endswith(INSTALL)
    assert list(tmp_path.iterdir()) == []


def test_other_spaces_are_refused() -> None:
    with pytest.raises(ValueError, match="ε-greedy needs discrete actions"):
        GymBatchEnv(partial(gym_env, "Pendulum-v1"), max_steps=5)
    with pytest.raises(ValueError, match=r"must be Discrete or Box.*put a wrapper"):
        GymBatchEnv(partial(gym_env, "Blackjack-v1"), max_steps=5)
    with pytest.raises(ValueError, match="max_steps must be at least 1, got 0"):
        GymBatchEnv(LAKE, max_steps=0)
