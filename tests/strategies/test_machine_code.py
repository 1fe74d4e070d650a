"""Machine code that is kept on disk: read without numba, whole, and never for something else."""

import json
import math
import subprocess
import sys

import pytest
import torch

from bmc_torchrl.strategies import machine_code
from bmc_torchrl.strategies.machine_code import FLAGS, NUMBER, NUMBERS, WHOLE_NUMBERS, machine_loop


def doubled(x):
    return 2 * x


def tripled(x):
    return 3 * x


def scale(numbers, flags, counts, size):
    for at in range(size):
        if flags[at]:
            numbers[at] = change(numbers[at])  # noqa: F821
            counts[0] += 1


def grown(x):
    return math.expm1(x)


ARGUMENTS = [NUMBERS, FLAGS, WHOLE_NUMBERS, NUMBER]


def scaled(change=doubled):
    loop = machine_loop(scale, ARGUMENTS, change=change)
    numbers = torch.arange(1.0, 5.0, dtype=torch.float64)
    flags, counts = torch.tensor([True, False, True, True]), torch.zeros(1, dtype=torch.int64)
    loop(*(x.data_ptr() for x in (numbers, flags, counts)), 4)
    return numbers.tolist(), int(counts)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def compiled(monkeypatch):
    """How often something was compiled."""
    calls, compile_ = [], machine_code._compiled
    monkeypatch.setattr(machine_code, "_compiled", lambda *a: calls.append(a) or compile_(*a))
    return calls


def test_a_loop_writes_where_it_is_told(folder):
    assert scaled() == ([2, 2, 6, 8], 3)


def test_what_is_kept_is_not_compiled_again(folder, compiled):
    found = [scaled() for _ in range(3)]
    assert found == [([2, 2, 6, 8], 3)] * 3
    assert len(compiled) == 1
    (file,) = folder.iterdir()
    assert file.suffix == ".o"


def test_another_rule_is_other_code(folder, compiled):
    assert scaled(doubled) != scaled(tripled) == ([3, 2, 9, 12], 3)
    assert len(compiled) == 2


@pytest.mark.parametrize("library", [machine_code.LIBM, set()])
def test_what_calls_more_than_libm_is_not_kept(folder, compiled, library, monkeypatch):
    monkeypatch.setattr(machine_code, "LIBM", library)
    for _ in range(2):
        numbers, _ = scaled(grown)
        assert numbers == pytest.approx([math.expm1(1), 2, math.expm1(3), math.expm1(4)], rel=1e-15)
    assert len(compiled) == (1 if library else 2)
    assert folder.exists() == bool(library)


@pytest.mark.parametrize("what", ["_checksum", "version", "source_checksum"])
def test_code_of_another_version_is_left_alone(folder, compiled, what, monkeypatch):
    scaled()
    other = {"_checksum": lambda code: b"none", "version": lambda name: "0"}
    monkeypatch.setattr(machine_code, what, other.get(what, lambda functions: 0))
    assert scaled() == ([2, 2, 6, 8], 3)
    assert len(compiled) == 2


@pytest.mark.parametrize(
    "spoil", [lambda c: c[: len(c) // 2], lambda c: c[:-1] + b"?", lambda c: b""]
)
def test_a_damaged_file_is_compiled_and_kept_anew(folder, compiled, spoil):
    scaled()
    (file,) = folder.iterdir()
    file.write_bytes(spoil(file.read_bytes()))
    assert scaled() == scaled() == ([2, 2, 6, 8], 3)
    assert len(compiled) == 2
    assert list(folder.iterdir()) == [file]


@pytest.mark.parametrize("hindrance", ["a file in its place", "a full disk"])
def test_what_cannot_be_kept_runs_all_the_same(folder, compiled, hindrance, monkeypatch):
    if hindrance == "a full disk":

        def full(path, content):
            path.touch()
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(machine_code.Path, "write_bytes", full)
    else:
        folder.write_text("")
    assert scaled() == scaled() == ([2, 2, 6, 8], 3)
    assert len(compiled) == 2
    assert folder.is_file() or not list(folder.iterdir())


def test_without_a_folder_of_its_own_it_is_beside_the_code_or_among_the_users(monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    beside, users = machine_code._folders()
    assert beside == machine_code.Path(machine_code.__file__).parent / "__pycache__"
    assert users == machine_code.Path("/somewhere/bmc_torchrl")


UPDATE = """
import json, sys, torch
from tensordict import TensorDict
from bmc_torchrl import BMCEpsilon
strategy, returns = BMCEpsilon(), torch.linspace(0, 5, 100)
data = TensorDict({"greedy_return": returns + 1, "uniform_return": returns}, [100])
strategy.update(data)
modules = {"numba", "llvmlite"} & set(sys.modules)
print(json.dumps([sorted(modules), strategy.alpha.item().hex(), strategy.beta.item().hex()]))
"""


def test_the_second_process_learns_without_numba_and_the_same(folder):
    run = lambda: subprocess.run(  # noqa: E731
        [sys.executable, "-c", UPDATE], check=True, capture_output=True, text=True
    )
    (first, *posterior), (second, *again) = (json.loads(run().stdout) for _ in range(2))
    assert first == ["llvmlite", "numba"]
    assert second == ["llvmlite"]
    assert posterior == again
