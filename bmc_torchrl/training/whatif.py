"""What other strategies would have shown on the transitions of a job, logged beside the one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from bmc_torchrl.analysis.plots import save_figure, whatif_figure
from bmc_torchrl.analysis.tables import write_atomically
from bmc_torchrl.analysis.whatif import Counterfactual
from bmc_torchrl.strategies import EpsilonStrategy, StrategyBank
from bmc_torchrl.strategies.whatif import ACTING, PREFIX
from bmc_torchrl.training.metrics import log_points, runs_of
from bmc_torchrl.training.run_records import RecordedLearner

__all__ = ["WhatIf"]


class WhatIf(Callback):
    """Lets strategies learn from the transitions of another that acts: *counterfactual* ε.

    "ε each would have shown" is logged by :class:`~bmc_torchrl.training.metrics.EpisodeMetrics` as
    ``whatif/epsilon/<label>``, at the end of each episode, and ε of the strategy that acts at the
    same moment as ``whatif/acting``. Nothing that is learned changes. None of the strategies acted:
    with another ε other transitions would have been seen. A checkpoint has what they know.

    Args:
        strategies (mapping of str to EpsilonStrategy): By label, each with ``batch_shape=()``.
        folder (str or Path, optional): Where ``whatif.png`` and, in ``whatif.txt``, the advice go
            when training ends.
        labels (sequence of str): Of the strategies that act, equal shares of the runs each.
        figure (bool): Whether to draw.

    Examples:
        >>> from bmc_torchrl import BMCEpsilon
        >>> priors = {f"alpha0_{x}": BMCEpsilon(x, x + 0.01) for x in (1, 10, 100)}
        >>> trainer = L.Trainer(
        ...     callbacks=[WhatIf(priors)],  # beside EpisodeMetrics(), which logs
        ...     logger=False,
        ...     enable_checkpointing=False,
        ... )
    """

    def __init__(
        self,
        strategies: Mapping[str, EpsilonStrategy],
        folder: str | Path | None = None,
        *,
        labels: Sequence[str] = ("ε",),
        figure: bool = True,
    ) -> None:
        self.strategies, self.labels, self.figure = dict(strategies), list(labels), figure
        self.folder = None if folder is None else Path(folder)
        self.bank: StrategyBank | None = None
        self.learner: RecordedLearner
        self.first: dict[str, Tensor] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Let the bank learn with the learner's strategy."""
        assert isinstance(pl_module, RecordedLearner)
        self.learner = pl_module
        if stage == "fit" and (self.bank is None or pl_module.bank is not self.bank):
            self.bank = StrategyBank(self.strategies, pl_module.strategy.batch_shape)
            pl_module.watch(self.bank)
            self.first = {k: x.clone() for k, x in self._said().items()}

    def _said(self) -> dict[str, Tensor]:
        assert self.bank is not None
        return self.bank.diagnostics(self.learner.strategy)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Follow the learner to its device."""
        assert self.bank is not None
        self.bank.to(pl_module.device)

    def state_dict(self) -> dict[str, Any]:
        """What the strategies know, and what they showed."""
        if self.bank is None:
            return {}
        table = self.learner.log_of_episodes.watched
        return {"bank": self.bank.state_dict(), "episodes": table.clone(), "first": self.first}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        if self.bank is None or not state_dict:
            return
        self.bank.load_state_dict(state_dict["bank"])
        self.learner.log_of_episodes.watched.copy_(state_dict["episodes"])
        self.first = state_dict["first"]

    def found(self) -> list[Counterfactual]:
        """ε over episodes, for each of the strategies that acted; nothing before an episode."""
        log = self.learner.log_of_episodes
        points = [episode for episode in log_points(log.episodes) if episode <= int(log.done.min())]
        if log.endless or not points:
            return []
        columns, runs = [episode - 1 for episode in points], runs_of(self.labels, log.runs)
        assert self.bank is not None
        series: dict[str, dict[str, list[float]]] = {label: {} for label in runs}
        for name, first in self.first.items():
            start, table = first.double().expand(log.runs), log.diagnostics[name][:, columns]
            for label, own in runs.items():
                series[label][name] = [float(start[own].mean()), *table[own].mean(0).tolist()]
        return [
            Counterfactual(
                acting=label,
                episodes=[0, *points],
                own=series[label].pop(ACTING),
                others={k.removeprefix(PREFIX): x for k, x in series[label].items()},
                related=self._related(own),
                evidence=self._evidence(own),
            )
            for label, own in runs.items()
        ]

    def _acting(self, runs: slice) -> tuple[EpsilonStrategy, slice]:
        """The strategy of some runs, and which of its own those are."""
        for part, whole in self.learner.strategy.parts():
            if whole.start <= runs.start and runs.stop <= whole.stop:
                return part, slice(runs.start - whole.start, runs.stop - whole.start)
        return self.learner.strategy, slice(None)

    def _related(self, runs: slice) -> list[str]:
        acting, _ = self._acting(runs)
        return [label for label, each in self.strategies.items() if type(each) is type(acting)]

    def _evidence(self, runs: slice) -> float | None:
        acting, own = self._acting(runs)
        evidence, learned = acting.diagnostics().get("posterior/log_evidence"), acting.learned
        if evidence is None or learned is None:
            return None
        total = float(learned.reshape(-1)[own].sum())
        return abs(float(evidence.reshape(-1)[own].sum())) / total if total else None

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw, and give advice."""
        if self.folder is None or not trainer.is_global_zero:
            return
        found = self.found()
        lines = [line for each in found for line in each.advice()]
        text = "".join(f"{line}\n" for line in lines)
        write_atomically(self.folder / "whatif.txt", lambda stream: stream.write(text.encode()))
        for each in found if self.figure else ():
            name = "whatif" if len(found) == 1 else f"whatif_{each.acting}"
            save_figure(whatif_figure(each), self.folder / name)
