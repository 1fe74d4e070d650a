"""Where every run stands: episodes, what they measured, and which runs have finished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bmc_torchrl.precision import KeepsPrecision

__all__ = ["MEASURED", "EpisodeLog"]

MEASURED = ("steps", "returns", "epsilons", "train_returns", "losses", "train_steps")
"""The tables of every log and engine, in this order."""


class EpisodeLog(KeepsPrecision):
    """Counters and results of each run, on the device, as buffers.

    ``steps`` and ``returns`` are those of the greedy tests after each training episode;
    ``epsilons``, ``train_returns``, ``losses`` and ``train_steps`` are the training episode's mean
    ε, undiscounted return, mean loss and length; ``diagnostics`` is what the strategy said of
    itself when it ended. Each is ``[runs, episodes]``, NaN where there is none yet. A run is
    *finished* when it has had all its episodes, or was stopped; nothing more is learned from it.

    Args:
        runs (int): Number of runs.
        episodes (int or None): Training episodes of each run; None for no limit, and only the last
            episode is remembered.
        test_every (int): Episodes between two tests, the last of which is after the last episode; a
            test stands for all the episodes since the one before.
        diagnostics (sequence of str): Names of what the strategy says of itself.

    Examples:
        >>> EpisodeLog(runs=2, episodes=3).finished
        tensor([False, False])
    """

    def __init__(
        self,
        runs: int,
        episodes: int | None,
        test_every: int = 1,
        diagnostics: Sequence[str] = (),
    ) -> None:
        super().__init__()
        if runs < 1 or (episodes is not None and episodes < 1):
            raise ValueError(f"runs and episodes must be positive, got {runs} and {episodes}.")
        if test_every < 1:
            raise ValueError(f"test_every must be positive, got {test_every}.")
        self.runs, self.episodes, self.test_every = runs, episodes or 1, test_every
        self.endless, self.names = episodes is None, tuple(diagnostics)
        self.done: Tensor
        self.stopped: Tensor
        self.ended: Tensor
        self.tested: Tensor
        self.running: Tensor
        self.measured: Tensor
        self.diagnosed: Tensor
        self.register_buffer("done", torch.zeros(runs, dtype=torch.int64))
        self.register_buffer("stopped", torch.zeros(runs, dtype=torch.bool))
        self.register_buffer("ended", torch.zeros(runs, dtype=torch.int64))
        self.register_buffer("tested", torch.zeros(runs, dtype=torch.int64))
        # Of the episode under way: steps, rewards, ε and losses, summed as Python does.
        self.register_buffer("running", torch.zeros(4, runs, dtype=torch.float64))
        shape = (runs, self.episodes)
        self.register_buffer("measured", torch.full((len(MEASURED), *shape), torch.nan))
        empty = torch.full((len(self.names), *shape), torch.nan, dtype=torch.float64)
        self.register_buffer("diagnosed", empty)
        self.watched_names: tuple[str, ...] = ()
        self.watched: Tensor
        self.register_buffer("watched", empty[:0], persistent=False)

    def watch(self, names: Sequence[str]) -> None:
        """Keep more of what :meth:`record` is told, in a table that checkpoints do not have.

        Args:
            names (sequence of str): What else is diagnosed, beside the strategy's own.
        """
        self.watched_names = tuple(names)
        shape = (len(self.watched_names), *self.done.shape, self.episodes)
        self.watched = torch.full(shape, torch.nan, dtype=torch.float64, device=self.done.device)

    @property
    def steps(self) -> Tensor:
        """Mean steps of the tests."""
        return self.measured[0]

    @property
    def returns(self) -> Tensor:
        """Mean discounted return of the tests."""
        return self.measured[1]

    @property
    def epsilons(self) -> Tensor:
        """Mean ε of each training episode."""
        return self.measured[2]

    @property
    def train_returns(self) -> Tensor:
        """Undiscounted return of each training episode."""
        return self.measured[3]

    @property
    def losses(self) -> Tensor:
        """Mean loss of each training episode."""
        return self.measured[4]

    @property
    def train_steps(self) -> Tensor:
        """Length of each training episode."""
        return self.measured[5]

    @property
    def diagnostics(self) -> dict[str, Tensor]:
        """What was said of the strategy at the end of each training episode, by name."""
        names, tables = (*self.names, *self.watched_names), (*self.diagnosed, *self.watched)
        return dict(zip(names, tables, strict=True))

    @property
    def finished(self) -> Tensor:
        """Runs that have nothing left to do, ``[runs]``."""
        return torch.zeros_like(self.stopped) if self.endless else self._over()

    def _over(self) -> Tensor:
        return (self.done >= self.episodes) | self.stopped

    @property
    def last_tested(self) -> Tensor:
        """Column of the last test of each run, ``[runs, 1]``; the first if there is none yet."""
        return (self.steps.isfinite().sum(-1, keepdim=True) - 1).clamp(min=0)

    @property
    def last_return(self) -> Tensor:
        """Undiscounted return of each run's last training episode, ``[runs]``; NaN before any."""
        last = torch.zeros_like(self.done) if self.endless else self.done - 1
        column = last.clamp(0, self.episodes - 1).unsqueeze(-1)
        return self.train_returns.gather(-1, column).squeeze(-1)

    def record(
        self,
        reward: Tensor,
        over: Tensor,
        epsilon: Tensor,
        loss: Tensor,
        diagnostics: Mapping[str, Tensor],
    ) -> Tensor:
        """Account for one vector step; returns the runs to test, whose episode ended with it.

        Args:
            reward (Tensor): ``[runs]``.
            over (Tensor): Where an episode ended, bool ``[runs]``.
            epsilon (Tensor): ε of the step, ``[runs]``.
            loss (Tensor): Loss of the update that followed, ``[runs]``.
            diagnostics (mapping): What the strategy says of itself, ``[runs]`` each.
        """
        ended = over & ~self.finished
        totals = self.running + torch.stack([torch.ones_like(reward), reward, epsilon, loss])
        length = totals[0]
        found = [totals[2] / length, totals[1], totals[3] / length, length]
        self._write(self.measured[2:], ended, torch.stack(found))
        for names, tables in (
            (self.names, self.diagnosed),
            (self.watched_names, self.watched),
        ):
            if names:
                said = [diagnostics[name].double().expand(self.runs) for name in names]
                self._write(tables, ended, torch.stack(said))
        self.running.copy_(torch.where(over, torch.zeros_like(totals), totals))
        self.done += ended
        due = ended
        if self.test_every > 1:
            due = ended & ((self.episodes - self.done) % self.test_every == 0)
        self.ended += due
        self.tested.copy_(torch.where(due, self.done, self.tested))
        return due

    def _write(self, tables: Tensor, where: Tensor, values: Tensor) -> None:
        """Put `values` ``[tables, runs]`` in the current episode's column, `where` it ended."""
        last = torch.zeros_like(self.done) if self.endless else self.done
        index = last.clamp(0, self.episodes - 1).unsqueeze(-1).expand(len(tables), -1, 1)
        kept = tables.gather(-1, index).squeeze(-1)
        tables.scatter_(-1, index, torch.where(where, values.to(kept), kept).unsqueeze(-1))

    def write_tests(self, tested: Tensor, steps: Tensor, returns: Tensor) -> None:
        """Keep the tests of the runs in `tested`, for the episodes up to the one tested after."""
        episode = torch.arange(self.episodes, device=tested.device)
        last = (torch.ones_like(self.tested) if self.endless else self.tested).unsqueeze(-1) - 1
        since = (episode <= last) & (episode > last - self._untested()) & tested.unsqueeze(-1)
        for table, values in ((self.steps, steps), (self.returns, returns)):
            table.copy_(torch.where(since, values.unsqueeze(-1).to(table), table))
        self.ended.masked_fill_(tested, 0)

    def _untested(self) -> Tensor:
        """Episodes that the next test of each run stands for, ``[runs, 1]``."""
        return (self.ended.clamp(min=1) * self.test_every).unsqueeze(-1)

    def stop(self, runs: Tensor) -> None:
        """Finish `runs` early: their results stay as they are from now on."""
        runs = runs & ~self.finished
        later = torch.arange(self.episodes, device=runs.device) >= self.done.unsqueeze(-1)
        for tables in (self.measured, self.diagnosed, self.watched):
            index = (self.done - 1).clamp(min=0).unsqueeze(-1).expand(len(tables), -1, 1)
            last = tables.gather(-1, index)
            tables.copy_(torch.where(later & runs.unsqueeze(-1), last, tables))
        self.stopped |= runs
