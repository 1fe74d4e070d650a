"""The defaults of the core are those that its documentation states, and TorchRL's where it says."""

from __future__ import annotations

import ast
import inspect
import re

import pytest
from torchrl.data import Categorical
from torchrl.modules import EGreedyModule

import bmc_torchrl
from bmc_torchrl import LinearEpsilon, OneStepReturns, functional, strategies

DOCUMENTED = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (bmc_torchrl, functional, strategies)
    for name in module.__all__
    if callable(getattr(module, name))
}


def stated_defaults(documentation: str) -> dict[str, object]:
    """Numbers and texts that ``name (…, optional): … Default: value.`` gives, by name."""
    found = {}
    entries = re.split(
        r"\n(?=\w+ \(.*\): )", inspect.cleandoc(documentation).replace("\n    ", "\n")
    )
    for entry in entries:
        name = re.match(r"(\w+) \(", entry)
        value = re.search(r"Default: (?:``(.+?)``|(-?[\d.]*\d))\.(?:\s|$)", entry)
        if name and value:
            found[name[1]] = ast.literal_eval(value[1] or value[2])
    return found


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_default_is_what_the_documentation_says(name: str) -> None:
    item = DOCUMENTED[name]
    parameters = inspect.signature(item).parameters
    for argument, value in stated_defaults(item.__doc__ or "").items():
        default = parameters[argument].default
        # None stands for an entry beside the action.
        assert default == value or default is None


def test_defaults_are_found_in_the_documentation() -> None:
    found = [(name, key) for name, x in DOCUMENTED.items() for key in stated_defaults(x.__doc__)]
    assert len(found) > 30
    assert stated_defaults(OneStepReturns.__doc__)["greedy_return_key"] == "greedy_return"
    assert stated_defaults(LinearEpsilon.__doc__) == {
        "initial": 1,
        "final": 0.1,
        "num_frames": 1000,
        "count_by": "update",
        "batch_shape": (),
    }


def test_linear_annealing_starts_ends_and_lasts_as_torchrls() -> None:
    ours, theirs = LinearEpsilon(count_by="step"), EGreedyModule(Categorical(2))
    # Theirs is a sum of single-precision steps.
    for _ in range(12):
        assert float(ours.eps) == pytest.approx(float(theirs.eps), abs=1e-4)
        ours.step(100)
        theirs.step(100)
