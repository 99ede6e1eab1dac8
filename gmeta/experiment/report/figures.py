"""The report's figures: error by inner steps and by support ratings, reliability, and the training curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gmeta.experiment.report.findings import after, capital, change, level, standings
from gmeta.experiment.report.style import (
    MUTED,
    Look,
    canvas,
    ceiling,
    label_lines,
    logarithmic,
    looks,
    whole_numbers,
)
from gmeta.experiment.results.evaluation import (
    LEVELS,
    TRAIN_LOSS,
    VALIDATION_MAE,
    Evaluation,
    Spread,
    TrainingRun,
)
from gmeta.experiment.results.metrics import METRICS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Marks inside the axes of a figure: lines with their spread, points off the scale, training runs.

Line = Mapping[float, Spread]
"""x -> mean and spread, in ascending order of x; every mean is defined."""


def curves(axes: Axes, evaluation: Evaluation, lines: Mapping[str, Line]) -> None:
    """Draw a line per method with its spread as a band, and its name and last value beside it.

    Points far above the rest are not drawn to scale: they are marked and labelled at the upper edge
    (`ceiling`), so that one untrained start doesn't hide the differences that matter. Methods that take no
    steps are dashed.

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
      rank: How many such points the edge already has: each is drawn below the one before.
    """
    low, top = axes.get_ylim()
    y = top - (top - low) * (0.04 + 0.075 * rank)
    axes.plot([x], [y], marker="^", markersize=7, color=look.colour)
    right = x < sum(axes.get_xlim()) / 2  # the text is on the side with more room
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
    """Average a curve over the runs: epoch -> mean, at epochs where all runs with the curve are finite."""
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
    """Choose a y axis that shows the end of training, not only its steep start.

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


# A figure of the report with its text.


@dataclass(frozen=True)
class Drawing:
    """A figure, its file name without suffix, what it shows, and how to read it."""

    name: str
    title: str
    caption: str
    figure: Figure


# The reliability of predicted variances: a figure, and the rows of a table.

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
        "the thin line a method is overconfident, below it underconfident; a line that rises separates sure "
        "predictions from unsure ones."
    )
    return Drawing(RELIABILITY, title, caption, figure)


def _title(evaluation: Evaluation) -> str:
    parts = (
        f"{evaluation.methods[name].label} {Spread.of(found.ratio).mean:.2f}"
        for name, found in evaluation.calibration.items()
    )
    return f"Squared error / predicted variance: {', '.join(parts)}"


NAMES = ("error-by-steps", "error-by-support", RELIABILITY, "training")
"""The names of the files that `draw` may make, without suffix."""


def draw(evaluation: Evaluation) -> list[Drawing]:
    """Draw all figures that the evaluation has data for, in the report's order."""
    makers: tuple[Callable[[Evaluation], Drawing | None], ...] = (
        error_by_steps,
        error_by_support,
        draw_reliability,
        training_curves,
    )
    return [drawing for make in makers if (drawing := make(evaluation))]


def error_by_steps(evaluation: Evaluation) -> Drawing | None:
    """Draw the error on cold tasks against gradient steps on their support ratings."""
    error = evaluation.error
    metric = METRICS[error]
    lines = _drop_undefined(
        {
            name: {float(steps): evaluation.spread(name, steps, error) for steps in sorted(method.results)}
            for name, method in evaluation.methods.items()
        }
    )
    if not any(len(line) > 1 for line in lines.values()):
        return None
    first, *others = standings(evaluation, error)
    title = f"{capital(first.label)} reaches the lowest error{first.where}"
    if others and level(first.spread, others[0].spread):
        title = f"{capital(first.label)} and {others[0].label} reach the same error, within the spread"
    subtitle = _subtitle(evaluation, f"{metric.label} on the query rows of {evaluation.data.split} tasks")
    figure, (axes,) = canvas(title, subtitle, 3.9, label=_longest_label(evaluation, lines))
    ticks = sorted({steps for line in lines.values() for steps in line})
    axes.set_xlim(ticks[0] - 0.03 * ticks[-1], ticks[-1] * 1.03)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xlabel("gradient steps on a task’s support ratings", fontsize=10, color=MUTED)
    curves(axes, evaluation, lines)
    caption = (
        f"{capital(metric.description)}, on the query rows of tasks that training has not seen, "
        "after each number of inner (or fine-tuning) steps on the task’s support rows. "
    )
    return Drawing(NAMES[0], title, caption + _band(evaluation), figure)


def error_by_support(evaluation: Evaluation) -> Drawing | None:
    """Draw MAE on cold tasks against the number of support ratings that a task may use; log-2 x axis."""
    lines = _drop_undefined(
        {
            name: {float(size): Spread.of(values) for size, values in sorted(sizes.items())}
            for name, sizes in evaluation.support_curve.items()
        }
    )
    sizes = sorted({size for line in lines.values() for size in line})
    if len(sizes) < 2:
        return None
    steps = "" if evaluation.support_steps is None else f" {after(evaluation.support_steps)}"
    title = _support_title(evaluation, lines)
    subtitle = _subtitle(evaluation, f"MAE on the query ratings of {evaluation.data.split} tasks{steps}")
    figure, (axes,) = canvas(title, subtitle, 3.9, label=_longest_label(evaluation, lines))
    # Zero has no logarithm: its point is one doubling to the left of the smallest positive size.
    fewest = math.log2(min(size for size in sizes if size > 0))
    at = {size: math.log2(size) if size > 0 else fewest - 1 for size in sizes}
    left, right = at[sizes[0]], at[sizes[-1]]
    axes.set_xlim(left - 0.03 * (right - left), right + 0.03 * (right - left))
    axes.set_xticks(list(at.values()), [f"{size:g}" for size in sizes])
    axes.set_xlabel("support ratings given per task (logarithmic scale)", fontsize=10, color=MUTED)
    curves(axes, evaluation, {n: {at[size]: s for size, s in line.items()} for n, line in lines.items()})
    caption = (
        f"The same error when a task may use only so many of its support ratings{steps and ','}{steps}. "
    )
    return Drawing(NAMES[1], title, caption + _band(evaluation), figure)


def _support_title(evaluation: Evaluation, lines: Mapping[str, Line]) -> str:
    for name, line in lines.items():
        if evaluation.methods[name].adapts and len(line) > 1:
            (few, before), *_, (many, now) = line.items()
            label = evaluation.methods[name].label
            return f"From {few:g} to {many:g} support ratings, {label}’s MAE {change(before, now)}"
    return "Error by number of support ratings"


def training_curves(evaluation: Evaluation) -> Drawing | None:
    """Draw training loss and validation MAE by epoch: a thin line per seed, a thick line for their mean."""
    panels = {
        curve: heading
        for curve, heading in ((TRAIN_LOSS, "training loss"), (VALIDATION_MAE, "validation MAE"))
        if any(curve in run.curves for runs in evaluation.training.values() for run in runs)
    }
    if not panels:
        return None
    title = _training_title(evaluation)
    runs = max(len(runs) for runs in evaluation.training.values())
    subtitle = f"thin: each of {runs} trainings; thick: their mean" if runs > 1 else "one seed"
    label = max((evaluation.methods[name].label for name in evaluation.training), key=len)
    figure, grid = canvas(title, subtitle, 3.5, panels=len(panels), label=label, headings=True)
    for axes, (curve, heading) in zip(grid, panels.items(), strict=True):
        names = training_runs(axes, evaluation, curve)
        scale = fit_training(axes, evaluation, curve)
        axes.set_title(
            f"{heading}, {scale}" if scale else heading, loc="left", fontsize=10, color=MUTED, pad=7
        )
        axes.set_xlabel("epoch", fontsize=10, color=MUTED)
        if axes is grid[-1]:
            label_lines(axes, names)
    caption = (
        "Training loss is what each method minimises, so its level can’t be compared between methods. "
        "Validation MAE is the mean absolute error, in the label’s own unit, on tasks held out of training."
    )
    return Drawing(NAMES[3], title, caption, figure)


def _training_title(evaluation: Evaluation) -> str:
    ends = []
    for name, runs in evaluation.training.items():
        curve = mean_curve(runs, VALIDATION_MAE)
        if curve:
            ends.append(f"{evaluation.methods[name].label} at {list(curve.values())[-1]:.3f}")
    return f"Validation MAE ends with {' and '.join(ends)}" if ends else "Training loss by epoch"


def _longest_label(evaluation: Evaluation, lines: Mapping[str, Line]) -> str:
    return max((f"{evaluation.methods[name].label} 0.000" for name in lines), key=len)


def _drop_undefined(lines: Mapping[str, Line]) -> dict[str, Line]:
    kept = {name: {x: spread for x, spread in line.items() if spread.defined} for name, line in lines.items()}
    return {name: line for name, line in kept.items() if line}


def _subtitle(evaluation: Evaluation, what: str) -> str:
    seeds = len(evaluation.seeds)
    return f"{what}; " + (f"mean of {seeds} seeds, band ±1 standard deviation" if seeds > 1 else "one seed")


def _band(evaluation: Evaluation) -> str:
    if len(evaluation.seeds) == 1:
        return "One seed: the spread between seeds is unknown."
    return "The bands are one sample standard deviation over seeds to either side of the mean."
