"""What other strategies would have shown on the transitions of a job, and what to make of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd

__all__ = ["Counterfactual"]

STILL = 0.01
"""ε that changes by less has not moved."""

GONE = 0.1
"""ε below this share of its first value no longer explores."""

EARLY = 0.1
"""Share of the episodes before which that is early."""


@dataclass(frozen=True)
class Counterfactual:
    """ε over episodes, of the strategy that acted and of others that learned from what it saw.

    Attributes:
        acting: Label of the strategy that acted.
        episodes: Finished episodes at each instant; the first is 0.
        own: ε of the strategy that acted, at each instant.
        others: ε that the others would have shown, by label.
        related: Labels of those that are of the acting strategy's kind.
        evidence: Of one model against the other in a transition, on average; None if it is unknown.
    """

    acting: str
    episodes: Sequence[int]
    own: Sequence[float]
    others: Mapping[str, Sequence[float]]
    related: Sequence[str] = field(default=())
    evidence: float | None = None

    @property
    def title(self) -> str:
        """Of a figure or panel."""
        return f"Counterfactual: ε others would have shown on {self.acting}'s transitions"

    @property
    def legend(self) -> str:
        """Of the strategy that acted."""
        return f"{self.acting}, which acted"

    def table(self) -> pd.DataFrame:
        """Columns acting, strategy, acts, episode, epsilon."""
        lines = [(self.acting, True, self.own)]
        lines += [(label, False, values) for label, values in self.others.items()]
        return pd.concat(
            [
                pd.DataFrame(
                    {
                        "acting": self.acting,
                        "strategy": label,
                        "acts": acts,
                        "episode": self.episodes,
                        "epsilon": values,
                    }
                )
                for label, acts, values in lines
            ],
            ignore_index=True,
        )

    def advice(self) -> list[str]:
        """What stands out, in a line, and a second one that says how far to trust it.

        Examples:
            >>> priors = {"alpha0_1": [0.5, 0.3, 0.2], "alpha0_1000": [0.5, 0.5, 0.5]}
            >>> found = Counterfactual("bmc", [0, 1, 2], [0.5, 0.5, 0.499], priors, evidence=3e-6)
            >>> print(found.advice()[0])
            ε of bmc has not moved from 0.5: evidence per transition is 3e-06; alpha0_1 would be \
at 0.2 by now.
        """
        first, last = self.own[0], self.own[-1]
        gone = [e for e, x in zip(self.episodes, self.own, strict=True) if x < GONE * first]
        if abs(last - first) < STILL:
            said = self._still(first)
        elif gone and gone[0] <= EARLY * self.episodes[-1]:
            said = self._gone(first, gone[0])
        else:
            low, high = (pick(self.others, key=self._last) for pick in (min, max))
            said = (
                f"ε of {self.acting} went from {first:.3g} to {last:.3g}; {low} would be at "
                f"{self._last(low):.3g} by now, {high} at {self._last(high):.3g}."
            )
        return [
            said,
            f"Counterfactual: all of them learned from the transitions that {self.acting} took; "
            "with another ε it would have taken others.",
        ]

    def _last(self, label: str) -> float:
        return self.others[label][-1]

    def _candidates(self) -> Sequence[str]:
        return self.related or list(self.others)

    def _still(self, first: float) -> str:
        known = "" if self.evidence is None else f": evidence per transition is {self.evidence:.1g}"
        moved = max(self._candidates(), key=lambda x: abs(self._last(x) - self.others[x][0]))
        change = abs(self._last(moved) - self.others[moved][0])
        then = f"{moved} would be at {self._last(moved):.3g} by now"
        if change < STILL:
            then = "none of its kind would have moved either"
        return f"ε of {self.acting} has not moved from {first:.3g}{known}; {then}."

    def _gone(self, first: float, episode: int) -> str:
        highest = max(self._candidates(), key=self._last)
        then = f"{highest} would still be at {self._last(highest):.3g} in the end"
        if self._last(highest) < GONE * first:
            then = "none of its kind would explore in the end"
        return (
            f"ε of {self.acting} was below a tenth of its first {first:.3g} by episode {episode} "
            f"of {self.episodes[-1]}; {then}."
        )
