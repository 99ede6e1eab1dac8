"""The reliability of predicted variances: a figure, and the rows of a table."""

from __future__ import annotations

import math

from gmeta.experiment.report.drawing import Drawing
from gmeta.experiment.report.style import MUTED, canvas, label_lines, looks
from gmeta.experiment.results.calibration import LEVELS
from gmeta.experiment.results.evaluation import Evaluation
from gmeta.experiment.results.spread import Spread

RELIABILITY = "reliability"


def reliability_rows(evaluation: Evaluation) -> list[list[str]]:
    """Return the table's lines: a method's label, its ratio, and its coverage at each of `LEVELS`.

    The ratio is the mean of squared error / predicted variance, 1.00 ideally; coverage is a share in percent.
    """
    return [
        [
            evaluation.methods[name].label,
            Spread.of(found.ratio).format(2),
            *(f"{100 * Spread.of(found.coverage[level]).mean:.0f} %" for level in LEVELS),
        ]
        for name, found in evaluation.calibration.items()
    ]


def draw_reliability(evaluation: Evaluation) -> Drawing | None:
    """Draw errors against predicted deviations, a point for each tenth of the query rows."""
    lines = {
        name: list(zip(found.deviations, found.errors, strict=True))
        for name, found in evaluation.calibration.items()
        if all(map(math.isfinite, (*found.deviations, *found.errors)))
    }
    if not lines:
        return None
    labels = {name: evaluation.methods[name].label for name in lines}
    title = _title(evaluation)
    rows = f"a point for each tenth of the query rows of {evaluation.data.split} tasks"
    subtitle = f"root mean squared error; {rows}; equal on the thin line"
    figure, (axes,) = canvas(title, subtitle, 3.9, label=max(labels.values(), key=len))
    ends = [value for line in lines.values() for point in line for value in point]
    room = max(0.06 * (max(ends) - min(ends)), 0.01)
    low, high = min(ends) - room, max(ends) + room
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.plot([low, high], [low, high], color=MUTED, linewidth=0.8)
    styles = looks(evaluation)
    for name, line in lines.items():
        look, adapts = styles[name], evaluation.methods[name].adapts
        axes.plot(
            *zip(*line, strict=True),
            color=look.colour,
            marker=look.marker,
            markersize=6,
            linewidth=2.0 if adapts else 1.4,
            linestyle="-" if adapts else look.dashes,
        )
    axes.set_xlabel("predicted standard deviation of a label", fontsize=10, color=MUTED)
    label_lines(axes, [(labels[name], styles[name].colour, line[-1][1]) for name, line in lines.items()])
    caption = (
        "Root mean squared error against predicted standard deviation, the noise of labels included. Above "
        "the thin line a method is too sure of itself, below it too careful; a line that rises tells sure "
        "predictions from unsure ones."
    )
    return Drawing(RELIABILITY, title, caption, figure)


def _title(evaluation: Evaluation) -> str:
    parts = (
        f"{evaluation.methods[name].label} {Spread.of(found.ratio).mean:.2f}"
        for name, found in evaluation.calibration.items()
    )
    return f"Squared error / predicted variance: {', '.join(parts)}"
