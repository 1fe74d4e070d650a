"""Code in the documents is code: Python runs, and commands take what they are given."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import sys
import textwrap
import tomllib
import types
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from documents import DOCUMENTS, ROOT, Block, blocks, prose, relative
from hydra.errors import ConfigCompositionException, MissingConfigException

from bmc_torchrl.errors import SettingsError
from bmc_torchrl.experiments.command import COMMANDS
from bmc_torchrl.experiments.configs import CONFIGS, command_config
from bmc_torchrl.experiments.settings import chosen_strategies

CHECKED = {"python", "bash", "diff", "mermaid", "bibtex"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RUN = [path for path in DOCUMENTS if any(block.language == "python" for block in blocks(path))]


def test_every_block_of_code_is_in_a_language_that_is_checked() -> None:
    found = {
        f"{relative(path)}:{block.line}: {block.language!r}"
        for path in DOCUMENTS
        for block in blocks(path)
        if block.language not in CHECKED
    }
    assert not found


def test_there_is_one_diff_and_one_plan_each_with_a_test_of_its_own() -> None:
    where = {
        language: [relative(p) for p in DOCUMENTS for b in blocks(p) if b.language == language]
        for language in ("diff", "mermaid")
    }
    assert where == {"diff": ["README.md"], "mermaid": ["docs/architecture.md"]}


# What a reader has before the page's first line of Python.
GIVEN = {
    "docs/exploration.md": """
        import functools
        from torchrl.envs import GymEnv, InitTracker, TransformedEnv
        from bmc_torchrl import AdaptiveEGreedyModule, ApexEpsilon, BMCEpsilon
        def make_policy(strategy):
            return AdaptiveEGreedyModule(env.action_spec, strategy)
        env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    """,
    "docs/finite_mdps.md": """
        import torch
        from bmc_torchrl.envs import chain
        transitions = torch.eye(3).roll(1, 1)[:, None].expand(3, 2, 3)
        rewards, terminal, start = torch.ones(3, 2), torch.tensor([False, False, True]), 0
        before, other = chain(5), chain(5, slip=0.1)
    """,
    "docs/untuned.md": """
        from torchrl.collectors import Collector
        from torchrl.envs import RewardSum, TransformedEnv
        from tensordict.nn import TensorDictSequential
        from bmc_torchrl import AdaptiveEGreedyModule, BMCEpsilon, ChangeDetector, OneStepReturns
        from bmc_torchrl.envs import CartPoleEnv
        from torchrl.modules import MLP, QValueActor
        runs = 3
        env = TransformedEnv(CartPoleEnv(batch_size=[runs], observation="encoded"), RewardSum())
        network = MLP(in_features=4, out_features=2, num_cells=[8])
        values = QValueActor(network, in_keys=["observation"], action_space="categorical")
        explore = AdaptiveEGreedyModule(env.action_spec, BMCEpsilon(batch_shape=[runs]))
        returns = OneStepReturns(values, gamma=0.99)
        policy = TensorDictSequential(values, explore)
        collector = Collector(env, policy, frames_per_batch=90, total_frames=180)
    """,
}
SHORTER = {"max_steps=5_000": "max_steps=100"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("document", RUN, ids=relative)
def test_the_python_of_a_page_runs_from_top_to_bottom(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    if document.name == "benchmarl.md":
        names = benchmarl(monkeypatch)
    exec(textwrap.dedent(GIVEN.get(relative(document), "")), names)
    for block in blocks(document):
        if block.language == "python":
            code = block.code
            for long, short in SHORTER.items():
                code = code.replace(long, short)
            exec(compile("\n" * block.line + code, str(document), "exec"), names)
    check = RESULTS.get(relative(document))
    if check is not None:
        check(names)


def readme(names: dict) -> None:
    assert names["trainer"].global_step == 100
    assert "eval/return" in names["trainer"].callback_metrics


def exploration(names: dict) -> None:
    ladder = [float(make().eps) for make in names["policies"]]
    assert ladder == pytest.approx([0.4 ** (1 + i) for i in range(8)])
    assert "is_init" in names["env"].reset()


def finite_mdps(names: dict) -> None:
    assert names["env"].optimal_return(gamma=0.99, episode=200) > names["env"].optimal_return(0.99)


def untuned(names: dict) -> None:
    assert (names["explore"].strategy.return_count == 60).all()


def benchmarl_learned(names: dict) -> None:
    (explore, _), done = names["experiment"].algorithm.adaptive["agents"], names["experiment"].done
    assert explore.strategy.return_count.tolist() == [40.0, 40.0]
    assert done == ["agents"]


RESULTS = {
    "README.md": readme,
    "docs/exploration.md": exploration,
    "docs/finite_mdps.md": finite_mdps,
    "docs/untuned.md": untuned,
    "docs/benchmarl.md": benchmarl_learned,
}


def benchmarl(monkeypatch: pytest.MonkeyPatch) -> dict:
    """Stand-ins with BenchMARL's interface: pip does not install it beside our torchrl.

    An experiment builds the policy of its one group, collects 40 steps with it, and shows the
    algorithm the batch, as BenchMARL's does.
    """
    import torch
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule, TensorDictSequential
    from torchrl.data import Categorical, Composite
    from torchrl.modules import QValueModule

    spec = Composite(agents=Composite(action=Categorical(3, shape=(2,)), shape=(2,)))

    class Algorithm:
        action_mask_spec, action_spec, device = None, spec, "cpu"
        experiment_config = types.SimpleNamespace(gamma=0.9)
        group_map = {"agents": ["a", "b"]}  # noqa: RUF012

        def process_batch(self, group, batch):
            return batch

    class Config:
        @classmethod
        def get_from_yaml(cls):
            return cls()

    class Experiment:
        def __init__(self, task, algorithm_config, model_config, seed, config):
            self.algorithm, self.done = algorithm_config.associated_class()(), []

        def run(self):
            value = ("agents", "action_value")
            q_actor = TensorDictSequential(
                TensorDictModule(torch.nn.Linear(4, 3), [("agents", "observation")], [value]),
                QValueModule(
                    "categorical",
                    action_value_key=value,
                    out_keys=[("agents", "action"), value, ("agents", "chosen_action_value")],
                ),
            )
            policy = self.algorithm._get_policy_for_collection(q_actor, "agents", False)
            seen = {"observation": torch.randn(40, 2, 4)}
            end = torch.zeros(40, 2, 1, dtype=torch.bool)
            after = {**seen, "reward": torch.ones(40, 2, 1), "terminated": end, "done": end}
            batch = policy(TensorDict({"agents": TensorDict(seen, [40, 2])}, [40]))
            batch["next"] = TensorDict({"agents": TensorDict(after, [40, 2])}, [40])
            self.algorithm.process_batch("agents", batch)
            self.done.append("agents")

    module = types.ModuleType("benchmarl.algorithms")
    for name in ("Iql", "Qmix", "Vdn"):
        setattr(module, name, type(name, (Algorithm,), {}))
        setattr(module, f"{name}Config", type(f"{name}Config", (Config,), {}))
    for name, part in (("benchmarl", types.ModuleType("benchmarl")), (module.__name__, module)):
        monkeypatch.setitem(sys.modules, name, part)
    given = dict.fromkeys(("task", "model", "experiment_config"))
    return {"Experiment": Experiment, "__name__": "page", **given}


def test_the_citation_is_that_of_the_citation_file() -> None:
    (bibtex,) = (b.code for p in DOCUMENTS for b in blocks(p) if b.language == "bibtex")
    paper = yaml.safe_load((ROOT / "CITATION.cff").read_text())["preferred-citation"]
    fields = dict(re.findall(r"^\s+(\w+)\s+= \{(.*)\},?$", bibtex, re.MULTILINE))
    title = fields["title"].replace(r"{$\varepsilon$-BMC}", "ε-BMC")
    assert (title, fields["year"]) == (paper["title"], str(paper["year"]))
    names = [f"{each['family-names']}, {each['given-names']}" for each in paper["authors"]]
    assert fields["author"] == " and ".join(names)


def commands(document: Path) -> Iterator[str]:
    """Every command in a block of bash, and those that stand in a sentence or a table."""
    for block in blocks(document):
        if block.language == "bash":
            yield from in_bash(block)
    doors = "bmc|python|bash|pip|ruff|mkdocs"
    for found in re.findall(rf"`((?:{doors}) [^`]+)`", prose(document)):
        if not re.search(r"…|\bCOMMAND\b|\bNAME\.py|\|", found):
            yield " ".join(found.split())
    yield from re.findall(r"^    ((?:bmc|python|bash) .*)$", prose(document), re.MULTILINE)


def in_bash(block: Block) -> Iterator[str]:
    for line in block.code.replace("\\\n", " ").splitlines():
        command = line.split(" #")[0].strip()
        if command and not re.match(r"#|for .*; do$|done$", command):
            yield command


SAID = sorted({(relative(path), line) for path in DOCUMENTS[2:] for line in commands(path)})
SAID += sorted({("README.md", line) for line in commands(ROOT / "README.md")})


def test_commands_are_found() -> None:
    assert len(SAID) > 40
    assert ("docs/finite_mdps.md", "bmc train experiment=lake_dqn runs=8") in SAID
    assert ("README.md", "bash scripts/run.sh") in SAID


@pytest.mark.parametrize(("document", "command"), SAID)
def test_a_command_exists_and_takes_its_arguments(
    document: str,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
) -> None:
    program, *arguments = shlex.split(command)
    CHECKS[program](arguments, monkeypatch, pytestconfig)


@pytest.mark.parametrize(
    ("command", "refusal"),
    [
        ("bmc train experiment=lake_sarsa rnus=100", ConfigCompositionException),
        ("bmc train experiment=no_such_lake", MissingConfigException),
        ("bmc train experiment=lake_sarsa strategies=[bcm]", SettingsError),
        ("bmc reproduce experiments=[grid_sarsas]", AssertionError),
        ("bmc figures results --outt figures", SystemExit),
        ("bmc benchmark singel", SystemExit),
        ("bmc trian", AssertionError),
        ("bash scripts/tests.sh", AssertionError),
        ("bash scripts/test.sh --publish FOLDER", ValueError),
        ("pip install -c constraints.txt '.[experiment]'", AssertionError),
        ("python scripts/mutants.py --numbers 3", SystemExit),
    ],
)
def test_a_command_that_is_wrong_is_noticed(
    command: str,
    refusal: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
) -> None:
    program, *arguments = shlex.split(command)
    with pytest.raises(refusal):
        CHECKS[program](arguments, monkeypatch, pytestconfig)


def check_bmc(arguments: list[str], monkeypatch: pytest.MonkeyPatch, _: object) -> None:
    name, *given = arguments
    assert name in COMMANDS
    if not given:
        return
    if (Path(CONFIGS) / f"{name}.yaml").exists():
        cfg = command_config(name, given)
        if name == "train":
            chosen_strategies(cfg)
        assert set(cfg.get("experiments") or []) <= set(cfg.get("batch") or [])
    else:
        check_options(COMMANDS[name][0], [f"bmc {name}", *given], monkeypatch)


def check_options(module: str, argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let argparse judge, and nothing else happen."""

    class ParsedError(Exception):
        pass

    def stop(self, *_args, **_options):
        parse(self, argv[1:])
        raise ParsedError

    parse = argparse.ArgumentParser.parse_args
    main = importlib.import_module(module).main
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", argv)
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        with pytest.raises(ParsedError):
            getattr(main, "__wrapped__", main)()


def check_python(arguments: list[str], monkeypatch: pytest.MonkeyPatch, config: object) -> None:
    script, *given = arguments
    path = ROOT / script
    assert path.is_file()
    if path.stem in COMMANDS:
        check_bmc([path.stem, *given], monkeypatch, config)
    elif given:
        with monkeypatch.context() as patch:
            patch.syspath_prepend(path.parent)
            check_options(path.stem, [script, *given], monkeypatch)


def check_bash(arguments: list[str], _: object, config: pytest.Config) -> None:
    script, *given = arguments
    assert (ROOT / script).is_file()
    if script != "scripts/test.sh":
        assert set(given) <= {"pages"}
        return
    for option, value in pairwise([*given, ""]):
        if option == "-m":
            marker = value.removeprefix("not ")
            assert marker in [line.split(":")[0] for line in config.getini("markers")]
        elif option.startswith("--"):
            config.getoption(option)


def check_pip(arguments: list[str], _: object, __: object) -> None:
    assert arguments[:3] == ["install", "-c", "constraints.txt"]
    extras = [name for each in arguments for name in re.findall(r"\[(.*)\]", each)]
    assert {name for each in extras for name in each.split(",")} <= PROJECT[
        "optional-dependencies"
    ].keys()


def check_tool(program: str, first: list[str]) -> object:
    def check(arguments: list[str], _: object, __: object) -> None:
        named = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
        assert any(line.startswith(program) for line in named)
        assert not arguments or arguments[0] in first

    return check


def check_sourced(arguments: list[str], _: object, __: object) -> None:
    assert arguments == [".venv/bin/activate"]


CHECKS = {
    "bmc": check_bmc,
    "python": check_python,
    "bash": check_bash,
    "pip": check_pip,
    "ruff": check_tool("ruff", ["format", "check"]),
    "mypy": check_tool("mypy", []),
    "mkdocs": check_tool("mkdocs", ["serve", "build"]),
    ".": check_sourced,
}
