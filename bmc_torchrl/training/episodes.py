"""Where every run stands: episodes, what they measured, and which runs have finished."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from bmc_torchrl.precision import KeepsPrecision

__all__ = ["EpisodeLog"]


class EpisodeLog(KeepsPrecision):
    """Counters and results of each run, on the device, as buffers.

    ``steps``, ``returns`` and ``epsilons`` are ``[runs, episodes]``: the greedy tests after each
    training episode and its mean ε, NaN where there is none yet. A run is *finished* when it has
    had all its episodes, or was stopped; nothing more is learned from it.

    Args:
        runs: number of runs.
        episodes: training episodes of each run.
        test_every: episodes between two tests, the last of which is after the last episode; a test
            stands for all the episodes since the one before.

    >>> EpisodeLog(runs=2, episodes=3).finished
    tensor([False, False])
    """

    def __init__(self, runs: int, episodes: int, test_every: int = 1) -> None:
        super().__init__()
        if runs < 1 or episodes < 1:
            raise ValueError(f"runs and episodes must be positive, got {runs} and {episodes}.")
        if test_every < 1:
            raise ValueError(f"test_every must be positive, got {test_every}.")
        self.runs, self.episodes, self.test_every = runs, episodes, test_every
        self.done: Tensor
        self.stopped: Tensor
        self.ended: Tensor
        self.tested: Tensor
        self.train_return: Tensor
        self.steps: Tensor
        self.returns: Tensor
        self.epsilons: Tensor
        self.register_buffer("done", torch.zeros(runs, dtype=torch.int64))
        self.register_buffer("stopped", torch.zeros(runs, dtype=torch.bool))
        self.register_buffer("ended", torch.zeros(runs, dtype=torch.int64))
        self.register_buffer("tested", torch.zeros(runs, dtype=torch.int64))
        self.register_buffer("length", torch.zeros(runs))
        self.register_buffer("reward_sum", torch.zeros(runs))
        self.register_buffer("epsilon_sum", torch.zeros(runs))
        self.register_buffer("train_return", torch.full((runs,), torch.nan))
        for name in ("steps", "returns", "epsilons"):
            self.register_buffer(name, torch.full((runs, episodes), torch.nan))

    @property
    def finished(self) -> Tensor:
        """Runs that have nothing left to do, ``[runs]``."""
        return (self.done >= self.episodes) | self.stopped

    @property
    def last_tested(self) -> Tensor:
        """Column of the last test of each run, ``[runs, 1]``; the first if there is none yet."""
        return (self.steps.isfinite().sum(-1, keepdim=True) - 1).clamp(min=0)

    def record(self, transition: TensorDictBase, epsilon: Tensor) -> Tensor:
        """Account for one vector step; returns the runs to test, whose episode ended with it."""
        active = ~self.finished
        over: Tensor = transition.get(("next", "done")).squeeze(-1)
        ended = over & active
        length = self.get_buffer("length") + 1
        reward = self.get_buffer("reward_sum") + transition.get(("next", "reward")).squeeze(-1)
        total = self.get_buffer("epsilon_sum") + epsilon
        self._write(self.epsilons, ended, total / length)
        self.train_return.copy_(torch.where(ended, reward, self.train_return))
        for name, value in (("length", length), ("reward_sum", reward), ("epsilon_sum", total)):
            self.get_buffer(name).copy_(torch.where(over, torch.zeros_like(value), value))
        self.done += ended
        due = ended & ((self.episodes - self.done) % self.test_every == 0)
        self.ended += due
        self.tested.copy_(torch.where(due, self.done, self.tested))
        return due

    def write_tests(self, tested: Tensor, steps: Tensor, returns: Tensor) -> None:
        """Keep the tests of the runs in `tested`, for the episodes up to the one tested after."""
        episode = torch.arange(self.episodes, device=tested.device)
        last = self.tested.unsqueeze(-1) - 1
        meant = (episode > last - self.test_every) & (episode <= last) & tested.unsqueeze(-1)
        for table, value in ((self.steps, steps), (self.returns, returns)):
            table.copy_(torch.where(meant, value.unsqueeze(-1).to(table), table))
        self.ended.masked_fill_(tested, 0)

    def stop(self, runs: Tensor) -> None:
        """Finish `runs` early: their results stay as they are from now on."""
        runs = runs & ~self.finished
        later = torch.arange(self.episodes, device=runs.device) >= self.done.unsqueeze(-1)
        for table in (self.steps, self.returns, self.epsilons):
            last = table.gather(-1, (self.done - 1).clamp(min=0).unsqueeze(-1))
            table.copy_(torch.where(later & runs.unsqueeze(-1), last, table))
        self.stopped |= runs

    def _write(self, table: Tensor, where: Tensor, value: Tensor) -> None:
        index = self.done.clamp(0, self.episodes - 1).unsqueeze(-1)
        kept = table.gather(-1, index).squeeze(-1)
        table.scatter_(-1, index, torch.where(where, value, kept).unsqueeze(-1))
