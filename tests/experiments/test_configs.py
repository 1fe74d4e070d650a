"""Every YAML file composes and instantiates; what cannot be run says so before anything runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra.errors import ConfigCompositionException, HydraException, InstantiationException
from hydra.utils import instantiate
from jobs import EXPERIMENTS, FINITE, FOREIGN, ROOT, built, settings, tiny, train
from omegaconf import OmegaConf
from torch import nn

from bmc_torchrl.envs.gymnasium_batch import INSTALL
from bmc_torchrl.errors import SettingsError
from bmc_torchrl.experiments.build import settings_of
from bmc_torchrl.experiments.settings import check_settings, chosen_strategies
from bmc_torchrl.strategies import EpsilonStrategy

# Box2D and bsuite warn about themselves when first imported, for an environment's sizes.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*pkg_resources.*"),
]
GROUPS = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in (ROOT / "configs").iterdir()
    if folder.is_dir()
}
EVERY = [(group, name) for group, names in GROUPS.items() for name in names if group != "size"]
# What is of another kind than the default experiment needs one of its own.
WITH = {("learner", name): ["experiment=grid_dqn"] for name in GROUPS["learner"] if "dqn" in name}
WITH["domain", "cart_pole"] = ["experiment=cart_sarsa"]
WITH["domain", "gymnasium"] = ["experiment=taxi_sarsa"]
WITH["domain", "tabular"] = ["experiment=lake_sarsa"]


def test_the_groups_are_those_of_the_readme() -> None:
    assert GROUPS.keys() == {
        *("domain", "experiment", "explore", "learner", "logger", "size", "strategy", "sweep"),
        *("trainer", "whatif"),
    }
    assert GROUPS["experiment"] == sorted([*EXPERIMENTS, "supply_dqn_floor", *FINITE, *FOREIGN])


@pytest.mark.parametrize(("group", "name"), EVERY)
def test_every_file_composes_and_resolves(group: str, name: str) -> None:
    for module in ("minatar", "minigrid", "bsuite", "Box2D") if name in FOREIGN else ():
        pytest.importorskip(module, reason=INSTALL)
    cfg = settings(*WITH.get((group, name), []), f"{group}={name}")
    assert OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)


SIZES = {"grid_sarsa": (150, 4), "supply_sarsa": (2601, 100), "cart_sarsa": (162, 2)}
SIZES |= {"cart_sarsa protocol=paper": (108, 2), "frozen8_sarsa": (64, 4), "acrobot_dqn": (1, 3)}
SIZES |= {"lake_sarsa +task.map_name=8x8": (64, 4), "garnet_sarsa task.actions=3": (50, 3)}
SIZES["grid_sarsa +domain.env.grid={_target_: bmc_torchrl.envs.SubgoalGrid, rows: 6}"] = (180, 4)


@pytest.mark.parametrize("given", SIZES)
def test_what_depends_on_an_environments_size_is_read_from_the_environment(given: str) -> None:
    cfg = settings(*f"experiment={given}".split(maxsplit=1))
    states, actions = SIZES[given]
    assert cfg.families.vdbe == {"num_states": states, "delta": 1 / actions}


@pytest.mark.parametrize("name", GROUPS["strategy"])
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_strategy_instantiates_in_every_experiment(experiment: str, name: str) -> None:
    cfg = settings(f"experiment={experiment}", f"strategy={name}")
    entry = cfg.strategy
    given = {**cfg.families.get(entry.family, {}), **entry.parameters}
    strategy = instantiate(given, batch_shape=[3])
    assert isinstance(strategy, EpsilonStrategy)
    assert strategy.eps.shape == (3,)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
@pytest.mark.parametrize("protocol", ["published", "paper"])
def test_every_strategy_of_the_sweep_instantiates(experiment: str, protocol: str) -> None:
    cfg = settings(f"experiment={experiment}", f"protocol={protocol}")
    assert len(cfg.sweep.strategies) == 22
    for entry in cfg.sweep.strategies:
        given = {**cfg.families.get(entry.family, {}), **entry.parameters}
        strategy = instantiate(given, batch_shape=[2])
        if entry.family == "power":
            assert strategy.first_index == (0 if protocol == "published" else 1)


@pytest.mark.parametrize("name", GROUPS["learner"])
def test_every_learner_builds(name: str) -> None:
    chosen = WITH.get(("learner", name), [])
    _, learner, *_ = built(*chosen, f"learner={name}", "engine=torchrl", "device=cpu")
    assert isinstance(getattr(learner, "rule", None) or learner.learning, nn.Module)


@pytest.mark.parametrize("name", ["default", "ddp"])
def test_every_cpu_trainer_instantiates(name: str) -> None:
    cfg = settings(f"trainer={name}", "logger=none")
    trainer = instantiate(cfg.trainer.lightning, accelerator="cpu", logger=False)
    assert trainer.max_epochs == 1
    assert cfg.trainer.lightning.limit_val_batches == 0


@pytest.mark.parametrize("name", ["csv", "none", "wandb"])
def test_every_logger_instantiates(name: str, tmp_path: Path) -> None:
    loggers = instantiate(settings(f"logger={name}", f"output={tmp_path}").logger)
    kinds = [type(logger).__name__ for logger in (loggers if name != "csv" else [loggers])]
    csv = "EpisodeCSVLogger"
    assert kinds == {"csv": [csv], "none": [], "wandb": ["WandbLogger", csv]}[name]


PUBLISHED = {
    "grid_sarsa": (0.99, 500, 1.0, {"learning_rate": 0.7, "initializer": "normal"}),
    "grid_dqn": (0.99, 500, 1.0, {"hidden": [25, 25], "batch_size": 24, "epochs": 5}),
    "cart_sarsa": (0.95, 500, 10.0, {"learning_rate": 0.5, "decay": 0.99, "floor": 0.01}),
    "cart_dqn": (0.95, 300, 5.0, {"hidden": [12, 12], "l2": 1e-6, "epochs": 3}),
    "supply_sarsa": (0.95, 1000, 750.0, {"learning_rate": 0.6, "initializer": "normal"}),
    "supply_dqn": (0.95, 500, 25.0, {"hidden": [100, 100], "batch_size": 64, "epochs": 2}),
}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiments_pin_the_published_settings(experiment: str) -> None:
    gamma, episodes, alpha, learner = PUBLISHED[experiment]
    cfg = settings(f"experiment={experiment}")
    assert (cfg.name, cfg.gamma, cfg.episodes) == (experiment, gamma, episodes)
    assert cfg.families.bmc.alpha0 == alpha
    assert cfg.families.bmc.beta0 == pytest.approx(alpha + 0.01)
    assert {name: cfg.learner[name] for name in learner} == learner
    assert cfg.domain.tests == (1 if "grid" in experiment else 10)
    assert cfg.stop_after_perfect_tests == (4 if experiment == "cart_dqn" else None)
    assert cfg.settings.mask_terminated is False
    assert cfg.settings.next_action == ("before" if "sarsa" in experiment else "after")
    if "cart" in experiment:
        assert list(cfg.settings.bins) == [3, 3, 6, 3]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_papers_protocol_is_what_it_prints(experiment: str) -> None:
    cfg = settings(f"experiment={experiment}", "protocol=paper")
    assert cfg.settings.mask_terminated is True
    assert cfg.settings.next_action == "after"
    assert cfg.families.power.first_index == 1
    if experiment in ("grid_sarsa", "supply_sarsa"):
        assert cfg.learner.initializer == "uniform"
    if experiment == "supply_sarsa":
        assert (cfg.families.bmc.alpha0, cfg.families.bmc.beta0) == (1000.0, 1000.01)
    if "cart" in experiment:
        assert list(cfg.settings.bins) == [3, 3, 4, 3]


def test_the_papers_protocol_reaches_the_learner() -> None:
    for protocol, lowest, masked in (("published", -0.5, None), ("paper", 0.0, "terminated")):
        _, learner, *_ = built("engine=torchrl", f"protocol={protocol}", "device=cpu")
        weight = learner.rule.table.weight.detach()
        assert (float(weight.min()) < 0) == (lowest < 0)
        assert learner.returns.terminated_key == masked
        assert (learner.next_action is None) == (protocol == "paper")


MISSPELT = [
    "epsiodes=3",
    "strategy=bmk",
    "families.bmc.alpha=1",
    "learner.hiden=[3]",
    "domain=gird",
]


@pytest.mark.parametrize("override", MISSPELT)
def test_a_misspelt_name_does_not_compose(override: str) -> None:
    with pytest.raises((ConfigCompositionException, HydraException), match="ould not"):
        settings(override)


IMPOSSIBLE = {
    "runs=abc": "runs must be an integer of at least 1, got 'abc'",
    "runs=0": "runs must be an integer of at least 1, got 0",
    "episodes=0": "episodes must be an integer of at least 1, got 0",
    "episodes=2.5": "episodes must be an integer of at least 1, got 2.5",
    "seed=-1": "seed must be an integer of at least 0, got -1",
    "engine=fast": "engine must be one of auto, torchrl, lockstep; got 'fast'",
    "protocol=mine": "protocol must be one of published, paper; got 'mine'",
    "domain.max_steps=0": "domain.max_steps must be an integer of at least 1, got 0",
    "trainer.chunk_steps=0": "trainer.chunk_steps must be an integer of at least 1, got 0",
    "domain=cart_pole": "domain.env.model.bins cannot be set.*cart_… with domain=cart_pole",
    "strategies=[bmc,best]": r"unknown names \['best'\]; known: bmc, vdbe_001",
    "strategies=[]": "unknown names",
    "device=tpu": "device='tpu' cannot be used here",
    "engine=lockstep domain.native=false": "engine=lockstep needs one of this package's own",
    "domain=gymnasium": "domain.env.max_steps cannot be set",
    "experiment=cart_sarsa domain.env.model.bins=[0]": "bins must be four positive counts",
    "experiment=taxi_sarsa domain.env.make.name=Taxy-v4": "^Gymnasium cannot make 'Taxy-v4'",
    "experiment=acrobot_dqn learner=expected_sarsa": "learner.learning_rate cannot be set",
    "stop_after_perfect_tests=0": "stop_after_perfect_tests must be an integer of at least 1",
    "experiment=grid_sarsa learner=published_dqn": "learner.hidden cannot be set.*…_dqn with",
    "experiment=grid_dqn learner=expected_sarsa": "learner.learning_rate cannot be set",
}
NO_GPU = {
    "device=cuda": "device='cuda' cannot be used here.*use auto or cpu",
    "trainer=gpu": "accelerator=gpu needs a GPU, and device=auto is the CPU",
}
if not torch.cuda.is_available():
    IMPOSSIBLE |= NO_GPU


@pytest.mark.parametrize("overrides", IMPOSSIBLE)
def test_what_cannot_be_run_is_refused_with_the_reason(overrides: str) -> None:
    cfg = settings(*overrides.split())
    with pytest.raises(SettingsError, match=IMPOSSIBLE[overrides]):
        check_settings(cfg)


UNBUILDABLE = {
    "experiment=grid_dqn learner=dqn learner.n_steps=3 learner.torchrl=true": "torchrl=true has",
    "experiment=grid_dqn protocols.published.next_action=before": "'before' is for on-policy",
    "experiment=grid_dqn protocols.published.next_action=soon": "must be 'before' or 'after'",
    "table.initializer=ones": "initializer='ones' is unknown",
    "network.batch_size=5000 experiment=grid_dqn": "capacity=2000 must hold a batch",
    "families.bmc.alpha0=-1": "alpha0 must be positive",
}


@pytest.mark.parametrize("overrides", UNBUILDABLE)
def test_what_cannot_be_built_is_refused_before_anything_is_written(
    overrides: str, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    with pytest.raises((ValueError, InstantiationException)) as error:
        built(*overrides.split(), "engine=torchrl", "device=cpu", f"output={output}")
    assert UNBUILDABLE[overrides].split("'")[0] in str(error.value)
    assert not output.exists()


@pytest.mark.slow
def test_the_command_says_what_is_wrong_in_a_line_and_leaves_nothing(tmp_path: Path) -> None:
    output = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/train.py", "episodes=0", f"output={output}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert lines == ["bmc train: episodes must be an integer of at least 1, got 0."]
    assert list(tmp_path.iterdir()) == []


def test_the_main_example_is_complete() -> None:
    cfg = settings("experiment=grid_sarsa", "strategy=bmc", "runs=8", "episodes=20")
    check_settings(cfg)
    assert (cfg.runs, cfg.episodes, cfg.strategy.label) == (8, 20, "bmc")
    assert tiny("cart_dqn")[0] == "experiment=cart_dqn"
    assert callable(train.main)


def rules(*overrides: str, experiment: str = "supply_dqn") -> dict[str, str]:
    cfg = settings(f"experiment={experiment}", "sweep=paper", *overrides)
    found = {}
    for entry in cfg.sweep.strategies:
        network = instantiate(settings_of(cfg, [entry]).domain.env.network)
        found[entry.label] = network.truck_cost
    return found


def test_the_published_supply_chain_dqn_pays_trucks_by_two_rules() -> None:
    published = rules()
    assert len(published) == 22
    assert {label for label, rule in published.items() if rule == "ceil"} == {
        *("power_025", "power_05", "power_1", "power_15")
    }
    assert set(rules("protocol=paper").values()) == {"ceil"}


@pytest.mark.parametrize(
    ("override", "rule"), [("truck_cost=ceil", "ceil"), ("by_family={}", "floor")]
)
def test_one_override_makes_all_pay_trucks_alike(override: str, rule: str) -> None:
    assert set(rules(override).values()) == {rule}


@pytest.mark.parametrize("protocol", ["published", "paper"])
def test_an_experiment_has_floor_for_all(protocol: str) -> None:
    found = rules(f"protocol={protocol}", experiment="supply_dqn_floor")
    assert set(found.values()) == {"floor"}


def test_a_job_of_both_rules_says_how_to_choose() -> None:
    cfg = settings("experiment=supply_dqn", "strategies=[bmc,power_1]")
    with pytest.raises(
        SettingsError, match=r"bmc and power run with other settings.*by_family=\{\}"
    ):
        settings_of(cfg, chosen_strategies(cfg))
