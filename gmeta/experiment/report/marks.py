"""The marks inside the axes of a figure: lines with their spread, points off the scale, training runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gmeta.experiment.report.style import Look, ceiling, label_lines, logarithmic, looks, whole_numbers
from gmeta.experiment.results.evaluation import Evaluation, TrainingRun
from gmeta.experiment.results.spread import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Line = Mapping[float, Spread]
"""x -> mean and spread, in ascending order of x; every mean is defined."""


def curves(axes: Axes, evaluation: Evaluation, lines: Mapping[str, Line]) -> None:
    """Draw a line per method with its spread as a band, and its name and last value beside it.

    Points far above the rest are not drawn to scale: they are marked and labelled at the upper edge
    (`ceiling`), so that one untrained start doesn't flatten every difference that matters. Methods that take
    no steps are dashed.

    Args:
      axes: Where to draw; its x limits must be final.
      evaluation: The source of labels and looks.
      lines: Method name -> line.
    """
    points = [spread for line in lines.values() for spread in line.values()]
    tops = [spread.mean + (spread.deviation or 0.0) for spread in points]
    cut = ceiling([spread.mean for spread in points], tops)
    high = max(tops) if cut is None else cut
    low = min(spread.mean - (spread.deviation or 0.0) for spread in points)
    room = max(high - low, 0.01)
    axes.set_ylim(low - 0.08 * room, high + (0.08 if cut is None else 0.3) * room)
    styles, names, far = looks(evaluation), [], 0
    for name, line in lines.items():
        look, method = styles[name], evaluation.methods[name]
        last = list(line.values())[-1].mean
        names.append((f"{method.label} {last:.3f}", look.colour, last))
        kept = {x: spread for x, spread in line.items() if spread.mean <= high}
        for x in line:
            if x not in kept:
                far_point(axes, look, line, x, rank=far)
                far += 1
        if len(line) == 1 and kept:
            axes.axhline(last, color=look.colour, linewidth=1.4, linestyle=look.dashes)
        elif method.adapts:
            band(axes, look, kept)
        else:
            means = [spread.mean for spread in kept.values()]
            axes.plot(list(kept), means, color=look.colour, linewidth=1.4, linestyle=look.dashes)
    label_lines(axes, names)


def band(axes: Axes, look: Look, line: Line) -> None:
    """Draw the means as a line with markers, and one standard deviation to either side as a band."""
    xs, means = list(line), [spread.mean for spread in line.values()]
    deviations = [spread.deviation or 0.0 for spread in line.values()]
    lower = [mean - deviation for mean, deviation in zip(means, deviations, strict=True)]
    upper = [mean + deviation for mean, deviation in zip(means, deviations, strict=True)]
    axes.fill_between(xs, lower, upper, color=look.colour, alpha=0.15, linewidth=0)
    axes.plot(xs, means, color=look.colour, linewidth=2.2, marker=look.marker, markersize=6)


def far_point(axes: Axes, look: Look, line: Line, x: float, rank: int) -> None:
    """Draw a point above the axis: an arrow head at the edge, its value, and dotted lines to its neighbours.

    Args:
      axes: Where to draw; its limits must be final.
      look: The method's look.
      line: The method's whole line.
      x: The x of the point.
      rank: How many such points already stand at the edge: each is drawn below the one before.
    """
    low, top = axes.get_ylim()
    y = top - (top - low) * (0.04 + 0.075 * rank)
    axes.plot([x], [y], marker="^", markersize=7, color=look.colour)
    right = x < sum(axes.get_xlim()) / 2  # the text goes where there is room
    axes.annotate(
        f"{line[x].format()}, off the scale",
        (x, y),
        xytext=(9 if right else -9, 0),
        textcoords="offset points",
        fontsize=9.5,
        color=look.colour,
        ha="left" if right else "right",
        va="center",
    )
    places = list(line)
    i = places.index(x)
    for other in places[max(i - 1, 0) : i + 2]:
        if line[other].mean <= top:
            axes.plot([x, other], [y, line[other].mean], color=look.colour, linewidth=1.3, linestyle=":")


def mean_curve(runs: Sequence[TrainingRun], curve: str) -> dict[int, float]:
    """Average a curve over the runs, epoch -> mean, at epochs where every run with the curve is finite."""
    series = [dict(zip(run.epoch, run.curves[curve], strict=True)) for run in runs if curve in run.curves]
    means = {
        epoch: Spread.of([values.get(epoch, math.nan) for values in series])
        for epoch in sorted({epoch for values in series for epoch in values})
    }
    return {epoch: mean.mean for epoch, mean in means.items() if mean.defined == mean.total}


def training_runs(axes: Axes, evaluation: Evaluation, curve: str) -> list[tuple[str, str, float]]:
    """Draw a thin line per seed, and a thick line for their mean.

    Returns:
      Label, colour and last value of each method, for `label_lines`.
    """
    styles, names = looks(evaluation), []
    for name, runs in evaluation.training.items():
        look = styles[name]
        for run in runs:
            if len(runs) > 1 and curve in run.curves:
                axes.plot(run.epoch, run.curves[curve], color=look.colour, linewidth=0.9, alpha=0.4)
        mean = mean_curve(runs, curve)
        if mean:
            epochs, values = list(mean), list(mean.values())
            marker = look.marker if len(epochs) == 1 else ""
            axes.plot(epochs, values, color=look.colour, linewidth=2.2, marker=marker)
            names.append((evaluation.methods[name].label, look.colour, values[-1]))
    whole_numbers(axes)
    return names


def fit_training(axes: Axes, evaluation: Evaluation, curve: str) -> str:
    """Choose a y axis on which the end of training can be read, not only its steep start.

    Values that span more than a factor of four get a logarithmic axis. If the first quarter of the epochs
    takes up more than two thirds of the range, the axis ends just above the later values.

    Returns:
      A description of the axis for the reader; empty for a plain axis.
    """
    points = [
        (epoch, value)
        for runs in evaluation.training.values()
        for run in runs
        for epoch, value in zip(run.epoch, run.curves.get(curve, ()), strict=False)
        if math.isfinite(value)
    ]
    if not points:
        return ""
    values, last = [value for _, value in points], max(epoch for epoch, _ in points)
    low, high = min(values), max(values)
    if low > 0 and 4 * low < high:
        logarithmic(axes, low, high)
        return "logarithmic scale"
    late = max((value for epoch, value in points if 4 * epoch > last), default=high)
    if 3 * (late - low) < high - low and late > low:
        axes.set_ylim(low - 0.08 * (late - low), late + 0.3 * (late - low))
        return "start cut off"
    return ""
