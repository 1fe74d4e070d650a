"""How much memory runs take, before any is taken."""

from __future__ import annotations

import os

from omegaconf import DictConfig

from bmc_torchrl.errors import SettingsError
from bmc_torchrl.experiments.configs import environment_of

__all__ = ["bytes_of_a_run", "require_memory"]

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_RESULTS = 16
"""Numbers that are kept of every episode of a run: what is measured, and what a strategy says."""


def bytes_of_a_run(cfg: DictConfig) -> int:
    """What one run needs at least: its results, its replay or its table."""
    env, needed = environment_of(cfg), 8 * _RESULTS * int(cfg.episodes)
    capacity = cfg.learner.get("capacity")
    if capacity is None:
        return needed + 4 * int(env.num_states * env.num_actions)
    seen = env.observation_spec.values(True, True)
    observation = sum(part.dtype.itemsize * part.shape.numel() for part in seen)
    return needed + 2 * int(capacity) * int(observation)


def require_memory(bytes_needed: int, what: str) -> None:
    """Raise :class:`SettingsError` if the machine has not got so much memory.

    Args:
        bytes_needed: How much.
        what: Settings that decide it, for the message.
    """
    there = _memory()
    if bytes_needed > there:
        raise SettingsError(
            f"{what} would take at least {_readable(bytes_needed)} of memory, and this machine has "
            f"{_readable(there)}; use less, or divide the runs among jobs with a seed= each."
        )


def _memory() -> int:
    """The memory of the machine, or what this process may have of it."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _LIMITS:
        if os.path.exists(path):
            with open(path) as stream:
                text = stream.read().strip()
            there = min(there, int(text)) if text.isdigit() else there
    return there


def _readable(number: float) -> str:
    """A number of bytes in a fitting unit.

    >>> _readable(3.2e10), _readable(2e15)
    ('32 GB', '2,000 TB')
    """
    for unit, size in (("MB", 1e6), ("GB", 1e9)):
        if number < 1000 * size:
            return f"{number / size:.0f} {unit}"
    return f"{number / 1e12:,.0f} TB"
