"""The engine that the numba kernels make up: runs, resuming, stopping, what it refuses."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from kernel_cases import DOMAINS, LEARNERS, RUNS, strategies

from bmc_torchrl.envs import CartPoleEnv, SubgoalGridEnv, SupplyChainEnv, SupplyNetwork
from bmc_torchrl.learners.settings import ExpectedSarsaSettings, RunSettings
from bmc_torchrl.likelihoods import StudentTLikelihood
from bmc_torchrl.lockstep.numba.loops import CURVES
from bmc_torchrl.lockstep.numba.tabular import NumbaTabularEngine
from bmc_torchrl.strategies import BMCEpsilon, ConstantEpsilon, LinearEpsilon, VDBEEpsilon


class Unlike(ConstantEpsilon):
    """Inherits functions of numbers that are not its own."""

    @property
    def eps(self):
        return 1 - super().eps


def small_engine(name="grid_world", runs=6, strategy=None, **options):
    if strategy is None:
        strategy = BMCEpsilon(batch_shape=[runs])
    own = {"threads": 1} | {k: options.pop(k) for k in ("threads", "table") if k in options}
    learner = replace(LEARNERS[name], **options.pop("learner", {}))
    env = DOMAINS[name](batch_size=[runs], max_steps=50)
    return NumbaTabularEngine(env, strategy, replace(RUNS[name], **options), learner, **own)


def results(engine):
    return torch.stack([getattr(engine, name) for name in CURVES])


def diagnostics(engine):
    return torch.stack(list(engine.diagnostics.values()))


@pytest.mark.parametrize("name", ["grid_world", "supply_chain"])
def test_a_run_depends_on_seed_and_index_alone(name):
    whole = small_engine(name)
    whole.advance(600)
    assert whole.finished
    chunks = small_engine(name, threads=3)
    while not chunks.finished:
        chunks.advance(7)
    torch.testing.assert_close(results(chunks), results(whole), rtol=0, atol=0)
    torch.testing.assert_close(chunks.table, whole.table, rtol=0, atol=0)
    part = small_engine(name, runs=2, first_run=3)
    part.advance(600)
    torch.testing.assert_close(results(part), results(whole)[:, 3:5], rtol=0, atol=0)
    untested = small_engine(name, tests=0)
    untested.advance(600)
    torch.testing.assert_close(untested.table, whole.table, rtol=0, atol=0)
    other = small_engine(name, seed=4)
    other.advance(600)
    assert not torch.equal(other.epsilons, whole.epsilons)
    assert len(whole.epsilons.unique(dim=0)) == whole.runs


@pytest.mark.parametrize("name", list(DOMAINS))
def test_resuming_is_exact(name):
    env = DOMAINS[name]()
    build = lambda: strategies(env.num_states, env.num_actions)  # noqa: E731
    whole = small_engine(name, 12, build())
    whole.advance(600)
    first = small_engine(name, 12, build())
    first.advance(77)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = small_engine(name, 12, build(), seed=99)
    second.load_state_dict(torch.load(file, weights_only=True))
    second.advance(523)
    torch.testing.assert_close(results(second), results(whole), rtol=0, atol=0)
    torch.testing.assert_close(
        diagnostics(second), diagnostics(whole), rtol=0, atol=0, equal_nan=True
    )
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(second.state_dict()[key], value, rtol=0, atol=0, equal_nan=True)


def test_results_are_missing_until_the_episode_is_over():
    engine = small_engine()
    engine.advance(50)
    done = torch.arange(12) < engine.episodes_done.unsqueeze(-1)
    assert 0 < done.sum() < done.numel()
    assert not engine.finished
    assert torch.equal(results(engine).isfinite(), done.expand(6, -1, -1))
    assert torch.equal(diagnostics(engine).isfinite(), done.expand(8, -1, -1))


def test_strategies_are_diagnosed_at_the_end_of_each_episode():
    env = DOMAINS["grid_world"]()
    stacked = strategies(env.num_states, env.num_actions)
    engine = small_engine(runs=12, strategy=stacked)
    engine.advance(600)
    learned = strategies(env.num_states, env.num_actions)
    engine.write_strategy(learned)
    said = learned.diagnostics()
    assert list(engine.diagnostics) == list(said)
    for name, values in engine.diagnostics.items():
        torch.testing.assert_close(values[:, -1], said[name], rtol=0, atol=0, equal_nan=True)
        # Two runs of ε-BMC, then two of VDBE, which says what it skipped.
        speak = 4 if name.startswith("skipped") else 2
        assert torch.equal(values.isfinite().all(-1), torch.arange(12) < speak)
    assert small_engine(strategy=ConstantEpsilon(0.1, batch_shape=[6])).diagnostics == {}


def test_returns_that_are_not_finite_are_counted_and_teach_nothing():
    engine = small_engine(table=torch.full((6, 150, 4), torch.inf))
    engine.advance(600)
    skipped = engine.diagnostics["skipped/nonfinite"]
    assert torch.equal(skipped, engine.train_steps.cumsum(-1))
    assert (engine.diagnostics["posterior/alpha"] == 1).all()
    assert (engine.diagnostics["posterior/log_evidence"] == 0).all()


def test_value_changes_that_are_not_finite_are_counted_and_teach_nothing():
    vdbe = VDBEEpsilon(150, 1.0, 0.25, batch_shape=[6])
    engine = small_engine(strategy=vdbe, table=torch.full((6, 150, 4), torch.inf))
    engine.advance(600)
    skipped = engine.diagnostics["skipped/nonfinite"]
    assert torch.equal(skipped, engine.train_steps.cumsum(-1))
    engine.write_strategy(vdbe)
    assert torch.equal(vdbe.skipped["nonfinite"], skipped[:, -1].long())
    assert (vdbe.epsilons == 0.5).all()


def test_losses_are_those_of_the_training_episode():
    # Without learning all values are 0 and the TD error is the reward: -0.1, or -0.2 if blocked.
    engine = small_engine(learner={"learning_rate": 1e-30, "initializer": "zeros"})
    engine.advance(600)
    blocked = -10 * engine.train_returns / engine.train_steps - 1
    expected = 0.01 + 0.03 * blocked
    torch.testing.assert_close(engine.losses, expected, rtol=1e-5, atol=0)


def test_a_run_stops_after_enough_perfect_tests():
    # On the supply-chain no episode ends early: every test is perfect, from the first on.
    engine = small_engine("supply_chain", stop_after_perfect_tests=4)
    engine.advance(4 * 50)
    assert engine.finished
    assert (engine.steps == 50).all()
    for values in (*results(engine), *diagnostics(engine)):
        assert torch.equal(values[:, 4:], values[:, 3:4].expand(-1, 8))
    grid = small_engine(stop_after_perfect_tests=4)
    grid.advance(600)
    frozen = (grid.steps == 50).float().cumprod(-1)[:, 3].bool()
    assert torch.equal(grid.epsilons[frozen, 4:], grid.epsilons[frozen, 3:4].expand(-1, 8))


def test_supply_chain_return_is_discounted_and_grid_counts_steps():
    silent = SupplyNetwork(demand_rate=(0.0,), initial_stocks=(10, 0), rho_max=0, ship_max=(0,))
    engine = NumbaTabularEngine(
        SupplyChainEnv(silent, batch_size=[1]),
        ConstantEpsilon(0.5, batch_shape=[1]),
        RunSettings(gamma=0.95, episodes=1, tests=3),
        ExpectedSarsaSettings(learning_rate=0.6),
        threads=1,
    )
    engine.advance(200)
    assert engine.returns.item() == pytest.approx(-0.2 * (1 - 0.95**200) / 0.05, rel=1e-6)
    assert engine.steps.item() == 200


@pytest.mark.parametrize("kind", ["zeros", "normal", "uniform"])
def test_tables_start_as_asked(kind):
    table = small_engine(learner={"initializer": kind, "scale": 0.2}, runs=20).table
    moments = {"zeros": (0, 0), "normal": (0, 0.2), "uniform": (0.1, 0.2 / 12**0.5)}[kind]
    assert table.mean().item() == pytest.approx(moments[0], abs=0.01)
    assert table.std().item() == pytest.approx(moments[1], rel=0.05)
    given = torch.randn(20, 150, 4)
    assert torch.equal(small_engine(table=given, runs=20).table, given)


class AnotherLikelihood(StudentTLikelihood):
    """Whose evidence nobody but itself knows."""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threads": 0}, "threads must be at least 1"),
        ({"table": torch.zeros(6, 2, 2)}, r"table must have the shape \(6, 150, 4\)"),
        ({"strategy": BMCEpsilon(batch_shape=[5])}, r"build it with batch_shape=\[6\]"),
        ({"strategy": VDBEEpsilon(9, 1.0, 0.5, batch_shape=[6])}, "num_states=150"),
        ({"strategy": BMCEpsilon(num_states=150, batch_shape=[6])}, "one posterior per run"),
        (
            {"strategy": BMCEpsilon(likelihood=AnotherLikelihood(), batch_shape=[6])},
            "not with AnotherLikelihood",
        ),
        (
            {"strategy": BMCEpsilon(update="offline", batch_shape=[6])},
            r"online updates.*use engine=torchrl",
        ),
        ({"strategy": LinearEpsilon(count_by="step", batch_shape=[6])}, "count_by='step'"),
        ({"strategy": Unlike(0.1, batch_shape=[6])}, r"Unlike says how ε.*not in scalars\(\)"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        small_engine(**change)


def test_domains_the_kernels_do_not_have_are_refused():
    with pytest.raises(ValueError, match=r"one warehouse.*use engine=torchrl"):
        SupplyChainEnv(SupplyNetwork(demand_rate=(1.0, 1.0), initial_stocks=(1,))).scalars()
    with pytest.raises(ValueError, match=r"numba has no torch.float16: build env with dtype="):
        CartPoleEnv(dtype=torch.float16).scalars()
    with pytest.raises(ValueError, match="needs a step limit: build env with max_steps="):
        NumbaTabularEngine(
            SubgoalGridEnv(batch_size=[2], max_steps=None),
            BMCEpsilon(batch_shape=[2]),
            RUNS["grid_world"],
            LEARNERS["grid_world"],
        )


def test_a_state_of_another_engine_is_refused():
    engine = small_engine()
    with pytest.raises(ValueError, match="another engine"):
        engine.load_state_dict({})
    with pytest.raises(ValueError, match="arguments it was saved with"):
        engine.load_state_dict(small_engine(runs=7).state_dict())


def test_bmc_on_the_grid_world_reproduces_the_published_curve():
    """100 runs against the published mean curve: AUC 47.87 ± 0.12, ε .490 / .0113 / .0011."""
    engine = NumbaTabularEngine(
        SubgoalGridEnv(batch_size=[100]),
        BMCEpsilon(1.0, 1.01, batch_shape=[100]),
        replace(RUNS["grid_world"], episodes=500, seed=1),
        LEARNERS["grid_world"],
    )
    engine.advance(100_000)
    scores = engine.steps.mean(-1)
    error = np.hypot(0.12, scores.std().item() / 10)
    assert abs(scores.mean().item() - 47.87) < 3 * error
    assert (engine.steps[:, -50:] == 22).all()
    epsilon = engine.epsilons.mean(0)[[9, 99, 499]]
    torch.testing.assert_close(epsilon[:1], torch.tensor([0.490]).double(), rtol=0, atol=1e-3)
    torch.testing.assert_close(
        epsilon[1:], torch.tensor([0.0113, 0.0011]).double(), rtol=0.15, atol=0
    )
