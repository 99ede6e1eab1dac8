"""Where methods stand: the best value of each, and when two of them are level.

Two means count as different if they lie further apart than ``sqrt(s_a^2 + s_b^2)``, the standard deviation
of the difference of two single runs; ``s`` is the spread over seeds. This is no significance test: it keeps
the report from praising a difference that the next seed could reverse.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gmeta.experiment.results.evaluation import Evaluation
from gmeta.experiment.results.metrics import METRICS
from gmeta.experiment.results.spread import Spread


@dataclass(frozen=True)
class Standing:
    """The best value of a metric that a method reaches, and the number of steps it takes."""

    method: str
    label: str
    steps: int
    adapts: bool
    spread: Spread

    @property
    def where(self) -> str:
        """The number of steps as text, ``" after 5 steps"``; empty for a method that takes no steps."""
        return f" {after(self.steps)}" if self.adapts else ""


def after(steps: int) -> str:
    """Format a number of steps as part of a sentence."""
    return {0: "before adaptation", 1: "after 1 step"}.get(steps, f"after {steps} steps")


def level(a: Spread, b: Spread) -> bool:
    """Return whether two means differ by no more than the spread between seeds; see the module's rule."""
    noise = math.hypot(a.deviation or 0.0, b.deviation or 0.0)
    return abs(a.mean - b.mean) <= noise + 1e-12  # rounding is no difference


def standings(evaluation: Evaluation, metric: str) -> list[Standing]:
    """List every method at its best number of steps, best method first; omit methods without a value."""
    sign = 1.0 if METRICS[metric].better == "lower" else -1.0
    found = []
    for name, method in evaluation.methods.items():
        spreads = {steps: evaluation.spread(name, steps, metric) for steps in sorted(method.results)}
        spreads = {steps: spread for steps, spread in spreads.items() if spread.defined}
        if spreads:
            # The fewest of the steps that are as good to the digits that count.
            steps = min(spreads, key=lambda steps: round(sign * spreads[steps].mean, 5))
            found.append(Standing(name, method.label, steps, method.adapts, spreads[steps]))
    return sorted(found, key=lambda standing: sign * standing.spread.mean)


def change(before: Spread, now: Spread) -> str:
    """Describe a change, as in ``"falls from 1.001 to 0.917"``, or say that the value hardly moves."""
    if level(before, now):
        return f"hardly moves, from {before.mean:.3f} to {now.mean:.3f}"
    return f"{'falls' if now.mean < before.mean else 'rises'} from {before.mean:.3f} to {now.mean:.3f}"


def capital(text: str) -> str:
    """Capitalise the first letter of the text, and leave the rest as it is."""
    return text[:1].upper() + text[1:]
