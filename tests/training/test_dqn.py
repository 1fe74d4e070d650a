"""EpsilonGreedyDQN: what Lightning documents holds, checkpoints are exact, runs are independent."""

from __future__ import annotations

import time
from pathlib import Path

import gymnasium
import lightning as L  # noqa: N812
import pytest
import torch
from draws import recorded_draws
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from probes import LOOP_HALF_GREEDY, LOOP_OPTIMAL, ProbeEnv, exit_step
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import Categorical, LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import DistributionalQValueActor
from torchrl.objectives import DistributionalDQNLoss, DQNLoss, HardUpdate

from bmc_torchrl import (
    BMCEpsilon,
    ConstantEpsilon,
    ExplorationWinsEpsilon,
    LinearEpsilon,
    VDBEEpsilon,
)
from bmc_torchrl.envs import SubgoalGridEnv
from bmc_torchrl.learners.objectives import ExpectedSarsaLoss
from bmc_torchrl.learners.settings import ExpectedSarsaSettings, RunSettings
from bmc_torchrl.learners.values import QNetwork, QTable
from bmc_torchrl.lockstep.numba.tabular import NumbaTabularEngine
from bmc_torchrl.training import EpsilonGreedyDQN
from bmc_torchrl.training.compiled_steps import CompiledSteps

pytestmark = [
    # Lightning 2.6 about torch's pytrees, and about loaders that are not torch's.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]
QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}


def cart_pole() -> gymnasium.Env:
    return gymnasium.make("CartPole-v1")


def network(inputs: int = 4, outputs: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs))


def module(seed: int = 0, **options) -> EpsilonGreedyDQN:
    torch.manual_seed(seed)
    chosen = {"batch_size": 8, "buffer_size": 200, "eval_episodes": 2, **options}
    strategy = chosen.pop("strategy", None) or BMCEpsilon()
    q_network = chosen.pop("q_network", None) or network()
    return EpsilonGreedyDQN(chosen.pop("env", cart_pole), q_network, strategy, **chosen)


def trainer(steps: int, **options) -> L.Trainer:
    return L.Trainer(max_steps=steps, **{**QUIET, **options})


def fitted(made: EpsilonGreedyDQN, fit: L.Trainer) -> EpsilonGreedyDQN:
    fit.fit(made)
    return made


def everything(made: EpsilonGreedyDQN) -> dict[str, torch.Tensor]:
    found = {k: v for k, v in made.state_dict().items() if isinstance(v, torch.Tensor)}
    return found | {f"replay/{k}": v for k, v in made.learning.contents().items()}


def assert_identical(ours, theirs) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=0, equal_nan=True, msg=name)


def test_global_step_counts_optimiser_steps_and_max_steps_stops_there() -> None:
    made, fit = module(), trainer(25)
    fit.fit(made)
    assert fit.global_step == 25
    assert made.learning.updates == 25
    assert made.learning.ring.added == 25 + 7  # a batch of 8 before the first update


def test_a_fitted_module_validates_tests_and_predicts(tmp_path: Path) -> None:
    made, fit = module(), trainer(5)
    fit.fit(made)
    (found,) = fit.validate(made, verbose=False)
    assert set(found) == {"eval/return", "eval/steps"}
    assert found["eval/return"] == found["eval/steps"] >= 8
    assert set(fit.test(made, verbose=False)[0]) == {"test/return", "test/steps"}
    observations = torch.randn(6, 4)
    loader = torch.utils.data.DataLoader(observations, batch_size=3)
    actions = torch.cat(fit.predict(made, loader))
    assert torch.equal(actions, made.network(observations).argmax(-1))


def test_validation_changes_nothing_that_is_learned() -> None:
    plain = fitted(module(), trainer(30))
    validated = fitted(module(), trainer(30, val_check_interval=7, num_sanity_val_steps=1))
    assert_identical(everything(plain), everything(validated))


def test_model_checkpoint_keeps_the_best_by_a_logged_metric(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path, monitor="eval/return", mode="max", save_last=True)
    fit = trainer(30, val_check_interval=10, callbacks=[keep], enable_checkpointing=True)
    fit.fit(module())
    assert Path(keep.best_model_path).exists()
    assert float(keep.best_model_score) >= 8
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] in (10, 20, 30)


def test_early_stopping_stops(tmp_path: Path) -> None:
    stop = EarlyStopping("eval/return", patience=1, mode="max", stopping_threshold=1.0)
    fit = trainer(500, val_check_interval=10, callbacks=[stop], num_sanity_val_steps=0)
    fit.fit(module())
    assert fit.global_step == 10


def test_the_learning_rate_follows_its_scheduler_and_is_monitored(tmp_path: Path) -> None:
    def halve(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)

    logger = CSVLogger(tmp_path)
    monitor = LearningRateMonitor(logging_interval="step")
    fit = trainer(25, logger=logger, callbacks=[monitor], log_every_n_steps=1)
    fit.fit(module(lr=0.01, scheduler=halve))
    assert fit.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.0025)
    assert "lr-Adam" in (Path(logger.log_dir) / "metrics.csv").read_text()


def test_a_timer_and_max_time_stop_training() -> None:
    timer = Timer(duration={"seconds": 1}, interval="step")
    began = time.monotonic()
    fit = trainer(-1, callbacks=[timer], max_epochs=10**6)
    fit.fit(module())
    assert time.monotonic() - began < 60
    assert fit.global_step > 0
    fit = trainer(-1, max_time={"seconds": 1}, max_epochs=10**6)
    fit.fit(module(epoch_steps=20))
    assert fit.global_step > 0


class LargestGradient(Callback):
    """Watches what the optimiser is given."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        self.norms.append(float(torch.stack([g.square().sum() for g in grads]).sum().sqrt()))


def test_the_trainer_clips_gradients() -> None:
    watch = LargestGradient()
    trainer(20, gradient_clip_val=1e-3, callbacks=[watch]).fit(module())
    # Lightning clips after this hook; what Adam remembers is what it was given.
    made, fit = (
        module(optimizer=lambda p: torch.optim.SGD(p, lr=1.0)),
        trainer(1, gradient_clip_val=1e-3),
    )
    before = [p.detach().clone() for p in made.network.parameters()]
    fit.fit(made)
    pairs = zip(made.network.parameters(), before, strict=True)
    moved = torch.stack([(a - b).detach().square().sum() for a, b in pairs]).sum().sqrt()
    assert float(moved) == pytest.approx(1e-3, rel=1e-3)
    assert max(watch.norms) > 1e-3


def test_runs_are_clipped_each_by_itself() -> None:
    options = {"runs": 3, "strategy": BMCEpsilon(batch_shape=[3])}
    make = lambda p: torch.optim.SGD(p, lr=1.0)  # noqa: E731
    made = module(q_network=QNetwork(4, 2, (8,), runs=3), optimizer=make, **options)
    before = [p.detach().clone() for p in made.network.parameters()]
    trainer(1, gradient_clip_val=1e-3).fit(made)
    pairs = zip(made.network.parameters(), before, strict=True)
    moved = torch.stack([(a - b).reshape(3, -1).square().sum(-1) for a, b in pairs]).sum(0).sqrt()
    torch.testing.assert_close(moved.detach(), torch.full((3,), 1e-3), rtol=1e-3, atol=0)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precision_is_the_trainers_and_the_posterior_stays_float64(precision: str) -> None:
    optimizer = lambda p: torch.optim.Adam(p, lr=1e-3)  # noqa: E731
    made = module(optimizer=optimizer)
    trainer(12, precision=precision).fit(made)
    expected = {"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(precision, torch.float32)
    assert next(made.network.parameters()).dtype == expected
    assert made.strategy.alpha.dtype == torch.float64
    assert float(made.strategy.return_count) > 0


PATHS = {
    "plain": {},
    "n-step": {"n_steps": 3},
    "double, prioritised": {"loss": "double_dqn", "prioritized": True},
    "state-dependent": {
        "env": lambda: SubgoalGridEnv(max_steps=10),
        "q_network": lambda: QTable(150, 4),
        "strategy": lambda: VDBEEpsilon(150, 0.1, 0.25),
    },
    "softmax": {"explore": "softmax"},
    "zeta": {"explore": "zeta", "strategy": lambda: ConstantEpsilon(0.4)},
    "linear": {"strategy": lambda: LinearEpsilon(1.0, 0.1, 20)},
    "wins": {"strategy": lambda: ExplorationWinsEpsilon(5.0)},
    "torchrl": {"loss": lambda actor: _dqn_loss(actor)},
    "runs": {
        "runs": 2,
        "q_network": lambda: QNetwork(4, 2, (8,), runs=2),
        "strategy": lambda: BMCEpsilon(batch_shape=[2]),
    },
}


class SaveAt(Callback):
    """Saves a checkpoint in the middle of an epoch."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, *_) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def _dqn_loss(actor, gamma: float = 0.99) -> DQNLoss:
    loss = DQNLoss(actor, delay_value=True, action_space="categorical")
    loss.make_value_estimator(gamma=gamma)
    return loss


def built(path: str, **more) -> EpsilonGreedyDQN:
    """A module of one of the PATHS, or of several joined by " + "."""
    torch.manual_seed(0)
    given = {name: value for one in path.split(" + ") for name, value in PATHS[one].items()}
    for name in ("q_network", "strategy"):
        if name in given:
            given[name] = given[name]()
    return module(**given, **more)


@pytest.mark.parametrize("path", PATHS)
def test_a_resumed_job_equals_one_that_was_not_interrupted(path: str, tmp_path: Path) -> None:
    whole = built(path)
    trainer(40).fit(whole)
    saved = tmp_path / "saved.ckpt"
    trainer(23, callbacks=[SaveAt(17, saved)]).fit(built(path))
    torch.rand(3)
    second = built(path)
    trainer(40).fit(second, ckpt_path=saved, weights_only=True)
    if path != "torchrl":
        assert_identical(everything(whole), everything(second))
    assert_identical(
        {k: v for k, v in whole.state_dict().items() if isinstance(v, torch.Tensor)},
        {k: v for k, v in second.state_dict().items() if isinstance(v, torch.Tensor)},
    )


def test_the_same_seed_gives_the_same_bits() -> None:
    first, again = fitted(module(), trainer(30)), fitted(module(), trainer(30))
    assert_identical(everything(first), everything(again))


def test_a_loaded_checkpoint_gives_a_policy_that_acts(tmp_path: Path) -> None:
    made, fit = module(), trainer(30)
    fit.fit(made)
    fit.save_checkpoint(tmp_path / "saved.ckpt")
    loaded = EpsilonGreedyDQN.load_from_checkpoint(
        tmp_path / "saved.ckpt", env=cart_pole, q_network=network(), strategy=BMCEpsilon()
    )
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        data = env.rollout(5, loaded.policy)
    assert torch.equal(data["action"], made.network(data["observation"]).argmax(-1))
    assert torch.equal(loaded.strategy.eps, made.strategy.eps)
    assert loaded.hparams.gamma == 0.99


def test_runs_never_touch_each_other() -> None:
    def trained(shift: float) -> EpsilonGreedyDQN:
        made = module(
            q_network=QNetwork(4, 2, (8,), runs=3), runs=3, strategy=BMCEpsilon(batch_shape=[3])
        )
        for parameter in made.network.parameters():
            parameter.data[1] += shift
        trainer(20).fit(made)
        return made

    plain, shifted = trained(0.0), trained(0.01)
    for ours, theirs in zip(plain.network.parameters(), shifted.network.parameters(), strict=True):
        assert not torch.equal(ours[1], theirs[1])
    assert plain.strategy.alpha[1] != shifted.strategy.alpha[1]


def test_training_stops_after_the_episodes_of_every_run() -> None:
    made = module(episodes=3, runs=2, q_network=QNetwork(4, 2, (8,), runs=2),
                  strategy=ConstantEpsilon(1.0, batch_shape=[2]))  # fmt: skip
    trainer(-1, max_epochs=100).fit(made)
    log = made.log_of_episodes
    assert made.finished
    assert log.done.tolist() == [3, 3]
    assert bool(log.train_returns.isfinite().all())
    assert torch.equal(log.epsilons, torch.ones(2, 3))


@pytest.mark.slow
def test_cart_pole_is_learned() -> None:
    layers = nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    options = {"batch_size": 64, "buffer_size": 10_000, "lr": 1e-3, "chunk_steps": 100}
    made = module(q_network=nn.Sequential(*layers), **options)
    fit = trainer(3000)
    fit.fit(made)
    assert fit.validate(made, verbose=False)[0]["eval/return"] > 100


@pytest.mark.parametrize("path", PATHS)
def test_updates_in_chunks_are_those_one_by_one(path: str) -> None:
    single = fitted(built(path), trainer(30))
    fit = trainer(30)
    chunks = fitted(built(path, chunk_steps=7), fit)
    assert fit.global_step == 30
    assert_identical(
        {k: v for k, v in single.state_dict().items() if isinstance(v, torch.Tensor)},
        {k: v for k, v in chunks.state_dict().items() if isinstance(v, torch.Tensor)},
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", ["plain", "double, prioritised + zeta + wins", "runs"])
def test_compiled_updates_are_the_eager_ones(path: str) -> None:
    eager = fitted(built(path), trainer(30))
    fit = trainer(30)
    compiled = fitted(built(path, compile=True, chunk_steps=7), fit)
    assert fit.global_step == 30
    ours, theirs = everything(compiled), everything(eager)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(
            value, theirs[name], rtol=2e-4, atol=2e-5, equal_nan=True, msg=lambda m, n=name: n + m
        )


@pytest.fixture
def uncompiled():
    """Graphs run as plain Python: which of them there are, and in which order, is what matters."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("path", [path for path in PATHS if path != "torchrl"])
def test_a_resumed_compiled_job_takes_the_action_it_had_chosen(
    path: str, tmp_path: Path, uncompiled: None
) -> None:
    options = {"compile": True, "chunk_steps": 5}
    whole = fitted(built(path, **options), trainer(40))
    saved = tmp_path / "saved.ckpt"
    trainer(25, callbacks=[SaveAt(20, saved)]).fit(built(path, **options))
    torch.rand(3)
    second = built(path, **options)
    trainer(40).fit(second, ckpt_path=saved, weights_only=True)
    assert_identical(everything(whole), everything(second))


def test_an_update_is_one_graph_until_the_optimiser_is_set_anew(uncompiled: None) -> None:
    class HalfTheRate(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_) -> None:
            graphs.append(len(pl_module.compiled.graphs))
            pl_module.optimizers().param_groups[0]["lr"] = 5e-4

    graphs: list[int] = []
    made, fit = module(compile=True, chunk_steps=5), trainer(15, callbacks=[HalfTheRate()])
    fit.fit(made)
    assert graphs == [1, 2, 2]
    assert fit.global_step == 15


def test_what_an_episodes_end_sets_apart_is_never_one_argument_of_the_graph(
    uncompiled: None, monkeypatch
) -> None:
    whole, seen = CompiledSteps._whole, []
    monkeypatch.setattr(
        CompiledSteps, "_whole", lambda self, step: (seen.append(step), whole(self, step))[1]
    )
    fitted(built("state-dependent", compile=True), trainer(5))
    fitted(built("plain", compile=True), trainer(5))
    for step in seen:
        now = (step.observation, step.mask, step.state_now, step.experience.done)
        then = (*step.experience[:-2], step.experience.mask, step.state, step.reached)
        assert not {id(x) for x in now if x is not None} & {id(x) for x in then if x is not None}


def test_a_scheduled_rate_is_no_constant_of_the_graph(uncompiled: None) -> None:
    def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    made = fitted(module(compile=True, chunk_steps=5, scheduler=halving), trainer(10))
    assert len(made.compiled.graphs) == 2
    assert made.optimizers().param_groups[0]["lr"] == pytest.approx(1e-3 * 0.5**10)


@pytest.mark.parametrize("compile", [False, True])
def test_a_callback_sees_every_optimiser_step_of_a_chunk(compile: bool, uncompiled: None) -> None:
    class Watches(Callback):
        seen = 0

        def on_before_optimizer_step(self, *_) -> None:
            self.seen += 1

    watching = Watches()
    plain = fitted(module(compile=compile, chunk_steps=5), trainer(12))
    fit = trainer(12, callbacks=[watching])
    made = fitted(module(compile=compile, chunk_steps=5), fit)
    assert watching.seen == fit.global_step == 12
    for ours, theirs in zip(made.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_torchrls_parts_can_be_handed_over() -> None:
    replay = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    made = module(
        loss=_dqn_loss,
        replay_buffer=replay,
        target_updater=lambda loss: HardUpdate(loss, value_network_update_interval=5),
    )
    trainer(20).fit(made)
    assert len(replay) == 27
    assert {"observation", "action", "next"} <= set(replay[:].keys())


def test_a_collector_can_be_handed_over() -> None:
    def collect(policy):
        env = GymEnv("CartPole-v1", categorical_action_encoding=True)
        options = {"frames_per_batch": 20, "total_frames": -1}
        return Collector(env, policy, **options, auto_register_policy_transforms=False)

    made = module(collector=collect, updates_per_batch=5)
    trainer(20).fit(made)
    assert int(made.strategy.return_count) == 80


def test_c51_trains_on_cart_pole() -> None:
    atoms = 11
    net = nn.Sequential(nn.Linear(4, 2 * atoms), nn.Unflatten(-1, (atoms, 2)))
    actor = DistributionalQValueActor(
        nn.Sequential(net, nn.LogSoftmax(-2)),
        support=torch.linspace(0, 10, atoms),
        in_keys=["observation"],
        spec=Categorical(2),
        action_space="categorical",
    )
    made = module(
        q_network=actor, loss=lambda a: DistributionalDQNLoss(a, gamma=0.99, delay_value=True)
    )
    trainer(10).fit(made)
    assert float(made.strategy.return_count) > 0


GAMMA = 0.5


def on_a_probe(probe: ProbeEnv, q_network, updates: int, **options) -> EpsilonGreedyDQN:
    strategy = options.pop("strategy", None) or ConstantEpsilon(options.pop("epsilon", 1.0))
    made = EpsilonGreedyDQN(
        probe, q_network, strategy, gamma=GAMMA, batch_size=16, buffer_size=500, **options
    )
    trainer(updates).fit(made)
    return made


def assert_values(found, expected, within: float) -> None:
    torch.testing.assert_close(found.detach(), expected, rtol=0, atol=within)


COPIES = {"target_tau": 1.0, "target_interval": 5}
LOSSES = {
    "dqn": {"target_tau": 0.2},
    "dqn, copies": COPIES,
    "double": {"loss": "double_dqn", "target_tau": 0.2},
    "TorchRL's": {"loss": lambda actor: _dqn_loss(actor, GAMMA), "target_tau": 0.2},
}


@pytest.mark.parametrize("name", LOSSES)
def test_dqn_learns_the_optimal_values(name: str) -> None:
    table = QTable(2, 2)
    on_a_probe(ProbeEnv(), table, 250, lr=0.03, loss_function="l2", **LOSSES[name])
    assert_values(table.weight, LOOP_OPTIMAL, 0.03)


@pytest.mark.parametrize("torchrl", [False, True])
def test_expected_sarsa_learns_the_values_of_its_policy(torchrl: bool) -> None:
    table = QTable(2, 2)
    loss = _sarsa_loss if torchrl else "expected_sarsa"
    on_a_probe(ProbeEnv(), table, 250, epsilon=0.5, lr=0.03, loss=loss, target_tau=None,
               loss_function="l2")  # fmt: skip
    assert_values(table.weight, LOOP_HALF_GREEDY, 0.03)


def test_a_terminal_state_is_worth_nothing() -> None:
    table = QTable(2, 2)
    table.weight.data[1] = 100.0
    on_a_probe(ProbeEnv(exit_step), table, 150, lr=0.05, loss_function="l2", target_tau=0.2)
    assert_values(table.weight[0], torch.tensor([0.0, 1.0]), 0.02)


class AtomTable(nn.Module):
    """Logarithms of the atoms' probabilities for two states and two actions."""

    def __init__(self, atoms: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(2, atoms, 2))

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return self.logits[state].log_softmax(-2)


def test_c51_learns_what_each_action_earns() -> None:
    atoms, support = AtomTable(5), torch.linspace(0, 2, 5)
    actor = DistributionalQValueActor(
        atoms, support=support, in_keys=["state"], spec=Categorical(2), make_log_softmax=False
    )
    loss = DistributionalDQNLoss(actor, gamma=GAMMA, delay_value=True)
    strategy = VDBEEpsilon(2, sigma=1.0, delta=0.5)
    on_a_probe(
        ProbeEnv(exit_step), actor, 150, lr=0.2, loss=loss, target_tau=0.2, strategy=strategy
    )
    mean = (atoms(torch.tensor(0)).exp() * support.unsqueeze(-1)).sum(0)
    assert_values(mean, torch.tensor([0.0, 1.0]), 0.05)
    assert float(strategy.epsilons[0]) < 0.5


def _sarsa_loss(actor) -> ExpectedSarsaLoss:
    loss = ExpectedSarsaLoss(actor, epsilon=0.5, action_space="categorical")
    loss.make_value_estimator(gamma=GAMMA)
    return loss


def test_with_a_table_and_sgd_it_is_the_numba_engines_expected_sarsa() -> None:
    runs, steps, eta = 3, 120, 0.7
    initial = 0.1 * torch.randn(runs, 150, 4)
    table = QTable(150, 4, runs=runs)
    table.weight.data.copy_(initial)
    made = EpsilonGreedyDQN(
        SubgoalGridEnv(batch_size=[runs], max_steps=30),
        table,
        BMCEpsilon(batch_shape=[runs]),
        gamma=0.99,
        loss="expected_sarsa",
        loss_function="l2",
        buffer_size=None,
        target_tau=None,
        # The squared error has no ½.
        optimizer=lambda p: torch.optim.SGD(p, lr=eta / 2),
        runs=runs,
    )
    draws: list[torch.Tensor] = []
    with recorded_draws(draws):
        trainer(steps).fit(made)
    acts = torch.stack([draw for draw in draws if draw.shape == (2, runs)])
    run = RunSettings(
        gamma=0.99, episodes=steps, tests=0, mask_terminated=True, next_action="after"
    )
    engine = NumbaTabularEngine(
        SubgoalGridEnv(batch_size=[runs], max_steps=30),
        BMCEpsilon(batch_shape=[runs]),
        run,
        ExpectedSarsaSettings(learning_rate=eta),
        table=initial,
        threads=1,
    )
    uniforms = torch.zeros(steps, runs, 9, dtype=torch.float64)
    uniforms[..., :2] = acts[:steps].movedim(1, -1)
    engine.advance(steps, uniforms=uniforms)
    torch.testing.assert_close(table.weight.detach(), engine.table, rtol=0, atol=2e-6)
    again = BMCEpsilon(batch_shape=[runs])
    engine.write_strategy(again)
    torch.testing.assert_close(made.strategy.eps, again.eps, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 1.5}, "gamma must be between 0 and 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"loss": "sarsa"}, "loss must be 'dqn'"),
        ({"buffer_size": 4}, "must hold a batch"),
        ({"strategy": BMCEpsilon(batch_shape=[3])}, "build it with batch_shape=\\[1\\]"),
        ({"env": 3}, "env must be a TorchRL or Gymnasium environment"),
    ],
)
def test_what_cannot_be_built_says_why(options: dict, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        module(**options)


def test_validation_without_an_environment_of_its_own_says_what_to_pass() -> None:
    made = module(env=cart_pole())
    fit = trainer(3, num_sanity_val_steps=0)
    fit.fit(made)
    with pytest.raises(ValueError, match="pass eval_env="):
        fit.validate(made, verbose=False)
