"""What SECURITY.md says of the sources is so: nothing in the package unpickles or evaluates."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import bmc_torchrl

ROOT = Path(__file__).parents[1]
TUTORIALS = ROOT / "scripts/site/tutorials.py"
"""It runs this repository's tutorials, part by part, when the site is built."""
SOURCES = sorted(Path(bmc_torchrl.__file__).parent.rglob("*.py")) + sorted(
    path for path in (ROOT / "scripts").rglob("*.py") if path != TUTORIALS
)
UNSAFE_MODULES = {"pickle", "dill", "cloudpickle", "shelve", "joblib"}
UNSAFE_CALLS = {
    *("eval", "exec", "marshal.loads", "yaml.load", "yaml.unsafe_load", "pd.read_pickle"),
    *("np.load", "os.system", "torch.hub.load", "torch.jit.load"),
}


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def faults(source: str) -> list[str]:
    """What a file does that SECURITY.md says is not done."""
    tree, found = ast.parse(source), []
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [name for name in names if name.split(".")[0] in UNSAFE_MODULES]
    for name, call in calls(tree):
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        loads = name == "torch.load" or "ckpt_path" in options
        if name in UNSAFE_CALLS or (loads and options.get("weights_only") != "True"):
            found.append(ast.unparse(call))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_unpickles_or_evaluates(path: Path) -> None:
    assert faults(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "trainer.fit(module, ckpt_path=path)",
        "eval(text)",
        "yaml.load(text)",
    ],
)
def test_what_would_be_unsafe_is_found(source: str) -> None:
    assert len(faults(source)) == 1


def test_what_is_loaded_as_the_package_does_runs_no_code(tmp_path: Path) -> None:
    trace = tmp_path / "ran"

    class Malicious:
        def __reduce__(self):
            return Path.touch, (trace,)

    torch.save({"state_dict": {}, "job": Malicious()}, tmp_path / "last.ckpt")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert not trace.exists()
    torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert trace.exists(), "the checkpoint of this test is harmless"
