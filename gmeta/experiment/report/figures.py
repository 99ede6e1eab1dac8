"""The report's figures: error by inner steps and by support ratings, reliability, and the training curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from gmeta.experiment.report.drawing import Drawing
from gmeta.experiment.report.marks import Line, curves, fit_training, mean_curve, training_runs
from gmeta.experiment.report.reliability import RELIABILITY, draw_reliability
from gmeta.experiment.report.standing import after, capital, change, level, standings
from gmeta.experiment.report.style import MUTED, canvas, label_lines
from gmeta.experiment.results.evaluation import TRAIN_LOSS, VALIDATION_MAE, Evaluation
from gmeta.experiment.results.metrics import METRICS
from gmeta.experiment.results.spread import Spread

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
    # Zero has no logarithm: its point stands one doubling to the left of the smallest positive size.
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
