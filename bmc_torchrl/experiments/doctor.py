"""Versions, devices, what is missing for what, and whether the core works: one line each.

Exit status: 0 if the core works, whatever else is missing; 1 if it does not.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

__all__ = ["main"]

NAME = "bmc_torchrl"
PURPOSES = {
    "": "the core",
    "experiments": "bmc train and every other command",
    "examples": "scripts/examples, and experiments on others' environments",
    "kernels": "trying the kernels for CUDA without a GPU",
}
"""What each extra is for that a user may want; the empty one is what is always installed."""


def needed(extra: str) -> Iterator[Requirement]:
    """What this package declares for an extra, on this platform.

    Args:
        extra: Its name, or nothing for the core.
    """
    for line in requires(NAME) or ():
        requirement = Requirement(line)
        asked = requirement.marker is not None and "extra ==" in str(requirement.marker)
        if asked == bool(extra) and (
            requirement.marker is None or requirement.marker.evaluate({"extra": extra})
        ):
            yield requirement


def version_line(requirement: Requirement, found: str) -> str:
    """What is to be said of a package that is installed.

    Args:
        requirement: What is declared.
        found: The version that is installed.

    Examples:
        >>> version_line(Requirement("numba>=0.61,<0.69"), "0.68.1")
        'ok       numba 0.68.1'
        >>> version_line(Requirement("numba>=0.61,<0.69"), "0.60.0")
        'outside  numba 0.60.0: <0.69,>=0.61 was tried'
    """
    if requirement.specifier.contains(found, prereleases=True):
        return f"ok       {requirement.name} {found}"
    return f"outside  {requirement.name} {found}: {requirement.specifier} was tried"


def package_lines() -> Iterator[str]:
    """One line for every package that is installed, and one for what an extra lacks."""
    said = set()
    for extra, purpose in PURPOSES.items():
        missing = []
        for requirement in needed(extra):
            if requirement.name in said:
                continue
            said.add(requirement.name)
            try:
                yield version_line(requirement, version(requirement.name))
            except PackageNotFoundError:
                missing.append(requirement.name)
        if missing:
            install = f"pip install '{NAME}[{extra}]'" if extra else f"pip install {NAME}"
            yield f"missing  for {purpose}: {', '.join(missing)}; {install}"


def device_lines() -> Iterator[str]:
    """One line for every device that torch can use."""
    import torch

    yield f"device   cpu: {os.cpu_count()} cores, torch takes {torch.get_num_threads()}"
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        yield f"device   cuda:{number}: {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"
    if torch.backends.mps.is_available():
        yield "device   mps"
    if not torch.cuda.is_available():
        yield f"no CUDA  torch {torch.__version__} " + (
            "finds no device" if torch.version.cuda else "was built without it"
        )


def core_line() -> str:
    """Act and learn once."""
    import torch
    from tensordict import TensorDict
    from torchrl.data import Categorical

    from bmc_torchrl import AdaptiveEGreedyModule

    explore = AdaptiveEGreedyModule(Categorical(2))
    before = explore.eps.item()
    data = explore(TensorDict({"action": torch.zeros(1, dtype=torch.int64)}, [1]))
    data["greedy_return"], data["uniform_return"] = torch.ones(1), torch.zeros(1)
    explore.update(data)
    return f"works    the core: a transition moved ε from {before:.4f} to {explore.eps.item():.4f}"


def main() -> int:
    """Print the lines; those that need torch, which takes seconds to import, come last."""
    argparse.ArgumentParser(prog="bmc doctor", description=__doc__).parse_args()
    print(f"{NAME} {version(NAME)}, Python {platform.python_version()}, {platform.platform()}")
    for line in package_lines():
        print(line)
    print(end="", flush=True)
    try:
        for line in device_lines():
            print(line)
        print(core_line())
    except Exception as error:
        print(f"FAILS    the core: {type(error).__name__}: {' '.join(str(error).split())}")
        return 1
    return 0
