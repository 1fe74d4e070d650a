"""A mutation run of the core: small errors put into the code, one at a time, for the tests to find.

    python scripts/mutants.py                        200 mutants; started again, it goes on
    python scripts/mutants.py --again                those that survived, once more
    python scripts/mutants.py vdbe --number 40       of one module

A mutant changes one operator, bound, constant, default, condition, call or raise. Texts that people
read, types and assertions for the type checker are left alone. A mutant is run against the few test
files of its module, in a scratch copy, in a fork of a process that has imported torch once. It is
killed if a test fails, or if its tests take longer than the limit. Which mutants are drawn depends
on the seed and on the changed statement, not on the rest of the file. Those that no test could
tell from the original stand in equivalent_mutants.toml, with the reason, and do not count.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import functools
import hashlib
import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
COPIED = ("bmc_torchrl", "configs", "tests", "scripts", "pyproject.toml")
PRELOADED = """
    torch torch.testing tensordict tensordict.nn torchrl.collectors torchrl.data torchrl.envs
    torchrl.modules torchrl.objectives gymnasium numba numpy pandas openpyxl scipy.stats
    scipy.integrate mpmath rich.table lightning
"""

UPDATES = "core/test_functional_update core/test_functional"
STRATEGY = (
    "strategies/test_strategies core/test_bad_input core/test_untaken_steps "
    "core/test_documented_defaults"
)
WALKS = "strategies/test_walks strategies/test_bmc_epsilon strategies/test_bmc_numerics"
ENVS = "envs/test_envs_contract"
TESTS = {
    "functional": f"{UPDATES} core/test_egreedy_facts core/test_returns "
    "core/test_documented_defaults",
    "likelihoods": f"core/test_likelihoods {UPDATES} core/test_bad_input "
    "core/test_documented_defaults",
    "exploration": "core/test_exploration core/test_returns core/test_bad_input core/test_agents "
    "core/test_egreedy_facts core/test_action_distribution core/test_untaken_steps "
    "core/test_documented_defaults",
    "actions": "core/test_action_distribution core/test_egreedy_facts core/test_exploration",
    "precision": "core/test_precision core/test_bad_input strategies/test_repr",
    "strategies/base": f"{STRATEGY} strategies/test_named_time core/test_agents",
    "strategies/bmc": f"{WALKS} {STRATEGY} strategies/test_checkpoints strategies/test_repr "
    "lockstep/test_kernels",
    "strategies/compiled": f"{WALKS} lockstep/test_new_strategy",
    "strategies/machine_code": f"strategies/test_machine_code {WALKS}",
    "strategies/scalar": f"{WALKS} lockstep/test_kernels lockstep/test_new_strategy",
    "strategies/schedules": f"strategies/test_schedules {STRATEGY} lockstep/test_kernels",
    "strategies/stacked": f"{STRATEGY} strategies/test_named_time",
    "strategies/vdbe": f"strategies/test_walks strategies/test_schedules {STRATEGY} "
    "lockstep/test_kernels",
    "strategies/walks": f"{WALKS} core/test_compiled_exploration",
    "envs/base": ENVS,
    "envs/cart_pole": f"envs/test_env_cart_pole {ENVS} lockstep/test_kernels",
    "envs/factored": f"{ENVS} envs/test_env_supply_chain",
    "envs/grid_world": f"envs/test_env_grid_world {ENVS} lockstep/test_kernels",
    "envs/gymnasium_batch": "envs/test_gymnasium_batch",
    "envs/gymnasium_ids": "envs/test_gymnasium_ids",
    "envs/lanes": f"{ENVS} lockstep/test_kernels lockstep/test_new_domain",
    "envs/optimal": "envs/test_env_grid_world envs/test_env_cart_pole envs/test_env_supply_chain",
    "envs/poisson": "envs/test_env_supply_chain",
    "envs/supply_chain": f"envs/test_env_supply_chain {ENVS} lockstep/test_kernels",
    "envs/uniforms": ENVS,
    "analysis/statistics": "analysis/test_statistics",
    "analysis/comparison": "analysis/test_compare",
}
"""The test files of each module, those first that are most likely to notice."""

SWAPPED = {
    **{"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="},
    **{"is": "is not", "is not": "is", "in": "not in", "not in": "in"},
    **{"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "*", "**": "*"},
    **{"&": "|", "|": "&", "^": "&", "and": "or", "or": "and"},
}
TWINS = {"min": "max", "any": "all", "minimum": "maximum", "amin": "amax", "argmin": "argmax"}
TWINS |= {second: first for first, second in TWINS.items()}
OPERATOR = re.compile(r"is\s+not|not\s+in|\*\*|//|<=|>=|==|!=|\b(?:is|in|and|or)\b|[-<>+*/%&|^]")


class Mutant(NamedTuple):
    """Bytes ``[start, end)`` of a module that become `new`; `name` says which, whatever moves."""

    module: str
    start: int
    end: int
    new: str
    name: str

    @property
    def path(self) -> str:
        return f"bmc_torchrl/{self.module}.py"

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]

    def diff(self, source: bytes) -> str:
        before, after = source.decode().splitlines(), self.applied(source).decode().splitlines()
        lines = difflib.unified_diff(before, after, self.path, self.path, lineterm="", n=0)
        return "\n".join(line for line in lines if not line.startswith(("---", "+++")))


class Sites(ast.NodeVisitor):
    """Every place of a module where a mutant can be."""

    def __init__(self, module: str, source: bytes) -> None:
        self.module, self.source, self.within = module, source, [""]
        lines = source.splitlines(keepends=True)
        self.starts = [sum(map(len, lines[:i])) for i in range(len(lines))]
        self.modules: set[str] = set()
        self.found: list[Mutant] = []
        self.names: Counter[str] = Counter()
        self.visit(ast.parse(source))

    def _span(self, node: Any) -> tuple[int, int]:
        return (
            self.starts[node.lineno - 1] + node.col_offset,
            self.starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def _add(self, start: int, end: int, new: str) -> None:
        line = self.source.count(b"\n", 0, start)
        stop = self.starts[line + 1] if line + 1 < len(self.starts) else len(self.source)
        text = self.source[self.starts[line] : stop].decode().strip()
        old = " ".join(self.source[start:end].decode().split())
        name = f"{self.module} {self.within[-1]} | {text} | {old} → {' '.join(new.split())}"
        self.names[name] += 1
        if self.names[name] > 1:
            name = f"{name} #{self.names[name]}"
        mutant = Mutant(self.module, start, end, new, name)
        with contextlib.suppress(SyntaxError):
            ast.parse(mutant.applied(self.source))
            self.found.append(mutant)

    def _between(self, left: ast.AST, right: ast.AST) -> None:
        start, end = self._span(left)[1], self._span(right)[0]
        match = OPERATOR.search(self.source[start:end].decode())
        if match and match[0] in SWAPPED:
            self._add(start + match.start(), start + match.end(), SWAPPED[match[0]])

    def _scope(self, node: Any) -> None:
        self.within.append(f"{self.within[-1]}.{node.name}".lstrip("."))
        for child in ast.iter_child_nodes(node):
            if child not in node.decorator_list and child is not getattr(node, "returns", None):
                self.visit(child)
        self.within.pop()

    visit_FunctionDef = visit_ClassDef = _scope  # noqa: N815

    def _skip(self, node: ast.AST) -> None:
        """Types, texts, and what the type checker wants to hear."""

    visit_Assert = visit_JoinedStr = visit_ImportFrom = _skip  # noqa: N815

    def visit_Import(self, node: ast.Import) -> None:
        self.modules |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}

    visit_arg = _skip

    def visit_keyword(self, node: ast.keyword) -> None:
        # That of zip is an assertion.
        if node.arg != "strict":
            self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if ast.unparse(node.targets[0]) != "__all__":
            self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add(*self._span(node), "pass")

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
            self._between(left, right)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._between(*node.values[:2])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = (isinstance(side, ast.JoinedStr) for side in (node.left, node.right))
        if not any(texts):
            self._between(node.left, node.right)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        self._add(self._span(node)[0], self._span(node.operand)[0], "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(*self._span(node), str(not node.value))
        elif isinstance(node.value, int):
            self._add(*self._span(node), str(node.value + 1))
        elif isinstance(node.value, float):
            self._add(*self._span(node), repr(node.value * 2 or 1.0))

    def _condition(self, node: ast.If | ast.IfExp) -> None:
        if ast.unparse(node.test) == "TYPE_CHECKING":
            return
        start, end = self._span(node.test)
        self._add(start, end, f"not ({self.source[start:end].decode()})")
        self.generic_visit(node)

    visit_If = visit_IfExp = _condition  # noqa: N815

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        if ast.unparse(function) in ("warnings.warn", "_require"):
            return
        if isinstance(function, ast.Attribute):
            self._twin(function.attr, self._span(function)[1])
            owner = ast.unparse(function.value)
            if owner.split(".")[0] not in self.modules and owner not in ("self", "super()", "cls"):
                self._add(self._span(function.value)[1], self._span(node)[1], "")
        elif isinstance(function, ast.Name):
            self._twin(function.id, self._span(function)[1])
        self.generic_visit(node)

    def _twin(self, name: str, end: int) -> None:
        if name in TWINS:
            self._add(end - len(name), end, TWINS[name])


def drawn(modules: list[str], number: int, seed: int) -> list[Mutant]:
    """The sample: those whose names have the smallest hashes."""
    sites = [site for name in modules for site in Sites(name, source_of(name)).found]

    def rank(mutant: Mutant) -> str:
        return hashlib.sha256(f"{seed} {mutant.name}".encode()).hexdigest()

    print(f"{len(sites)} mutants in {len(modules)} modules; drawn: {min(number, len(sites))}")
    return sorted(sites, key=rank)[:number]


@functools.cache
def source_of(module: str) -> bytes:
    """As it was when the run began."""
    return (ROOT / f"bmc_torchrl/{module}.py").read_bytes()


@contextlib.contextmanager
def scratch_copy() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        copy, ignored = Path(name), shutil.ignore_patterns("__pycache__", ".hypothesis")
        for part in COPIED:
            if (ROOT / part).is_dir():
                shutil.copytree(ROOT / part, copy / part, ignore=ignored)
            else:
                shutil.copy2(ROOT / part, copy / part)
        yield copy


def passes(copy: Path, modules: list[str], limit: float) -> bool | None:
    """Whether the modules' tests pass; None if they take longer than `limit` seconds."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setsid()
        run_tests(copy, modules)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def run_tests(copy: Path, modules: list[str]) -> None:
    """In the fork; does not return."""
    import pytest

    os.chdir(copy)
    sys.path.insert(0, str(copy))
    os.environ["PYTHONPATH"] = str(copy)
    log = os.open(copy / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    doctests = [f"bmc_torchrl/{module}.py" for module in modules]
    files = [f"tests/{name}.py" for module in modules for name in TESTS[module].split()]
    options = ["-x", "-q", "-m", "not slow", "--assert=plain", "-p", "no:cacheprovider"]
    code = 70
    try:
        code = int(pytest.main([*options, *doctests, *dict.fromkeys(files)]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def verdict(copy: Path, mutant: Mutant, limit: float) -> str:
    file, source = copy / mutant.path, source_of(mutant.module)
    stat = file.stat()
    file.write_bytes(mutant.applied(source))
    try:
        passed = passes(copy, [mutant.module], limit)
    finally:
        file.write_bytes(source)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return {True: "survived", False: "killed", None: "killed by the limit"}[passed]


def preload() -> None:
    """Import what costs seconds; nothing of the package, which every fork imports anew."""
    # Bytecode is checked by the second and the size: a mutant's could pass for the next one's.
    sys.dont_write_bytecode = True
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "MPLBACKEND": "agg"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in PRELOADED.split():
            importlib.import_module(name)


def equivalents() -> dict[str, str]:
    found = tomllib.loads(EQUIVALENT.read_text())
    return {entry["mutant"]: entry["reason"] for entry in found["equivalent"]}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modules", nargs="*", help="such as vdbe or envs (default: all)")
    parser.add_argument("--number", type=int, default=200, help="of mutants (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (%(default)s)")
    parser.add_argument("--limit", type=float, default=300, help="seconds a mutant (%(default)s)")
    parser.add_argument("--again", action="store_true", help="test survivors once more")
    parser.add_argument("--results", type=Path, default=Path("outputs/mutants.jsonl"))
    return parser.parse_args()


def read_results(file: Path) -> dict[str, str]:
    if not file.exists():
        return {}
    rows = (json.loads(line) for line in file.read_text().splitlines())
    return {row["mutant"]: row["verdict"] for row in rows}


def score(mutants: list[Mutant], known: dict[str, str], same: dict[str, str]) -> tuple[int, int]:
    """How many died, of how many that count and are decided."""
    decided = [m for m in mutants if m.name in known]
    alive = [m for m in decided if known[m.name] == "survived"]
    counted = len(decided) - sum(m.name in same for m in alive)
    return len(decided) - len(alive), counted


def main() -> int:
    options = arguments()
    asked = [name for name in TESTS if not options.modules or _matches(name, options.modules)]
    mutants = drawn(asked, options.number, options.seed)
    known, same = read_results(options.results), equivalents()
    open_ = [
        m
        for m in mutants
        if m.name not in known
        or (options.again and known[m.name] == "survived" and m.name not in same)
    ]
    preload()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with scratch_copy() as copy:
        began = time.monotonic()
        if not passes(copy, sorted({m.module for m in open_}), limit=3600):
            print((copy / "log").read_text()[-2000:], file=sys.stderr)
            print("the tests fail without a mutant", file=sys.stderr)
            return 2
        print(f"without a mutant all tests pass ({time.monotonic() - began:.0f} s)", flush=True)
        for mutant in sorted(open_, key=lambda m: m.module):
            began = time.monotonic()
            known[mutant.name] = verdict(copy, mutant, options.limit)
            seconds = round(time.monotonic() - began, 1)
            row = {"mutant": mutant.name, "verdict": known[mutant.name], "seconds": seconds}
            with options.results.open("a") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            died, counted = score(mutants, known, same)
            done = sum(m.name in known for m in mutants)
            rate = f"{died}/{counted} = {died / max(counted, 1):.1%}"
            print(
                f"{done}/{len(mutants)}  {rate}  {known[mutant.name]} ({seconds} s)  {mutant.name}",
                flush=True,
            )
    return report(mutants, known, same)


def _matches(name: str, asked: list[str]) -> bool:
    return any(part == name or part in name.split("/") for part in asked)


def report(mutants: list[Mutant], known: dict[str, str], same: dict[str, str]) -> int:
    for mutant in mutants:
        if known[mutant.name] == "survived":
            said = f"equivalent: {same[mutant.name]}" if mutant.name in same else "SURVIVED"
            print(f"\n{said}\n  {mutant.name}\n{mutant.diff(source_of(mutant.module))}")
    died, counted = score(mutants, known, same)
    late = sum(known[m.name] == "killed by the limit" for m in mutants)
    print(
        f"\nkilled {died} of {counted} ({died / max(counted, 1):.1%}), {late} by the limit; "
        f"{len(mutants) - counted} equivalent ones left out"
    )
    return 0 if died == counted else 1


if __name__ == "__main__":
    sys.exit(main())
