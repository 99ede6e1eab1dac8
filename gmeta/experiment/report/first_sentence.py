"""The report's first sentence: whether a method beats the strongest baseline, by the paired bootstrap."""

from __future__ import annotations

from gmeta.experiment.report.standing import Standing, capital, level, standings
from gmeta.experiment.results.bootstrap import Comparison
from gmeta.experiment.results.evaluation import Evaluation
from gmeta.experiment.results.metrics import METRICS


def verdict(evaluation: Evaluation) -> str:
    """Say whether the best method beats the strongest baseline, with the interval of the difference.

    A difference is a win or a defeat if its interval leaves out zero (`gmeta.experiment.results.bootstrap`).

    Returns:
      One sentence; empty if the evaluation lacks methods that take steps, or baselines.
    """
    found = _rivals(evaluation)
    if found is None:
        return ""
    best, baseline = found
    metric, where = METRICS[evaluation.error].label, f"on {evaluation.data.split} tasks"
    values = f"{metric} {best.spread.mean:.3f}{best.where} against {baseline.spread.mean:.3f}"
    compared = comparison(evaluation, best, baseline)
    if compared is None:
        if best.spread.mean < baseline.spread.mean:
            return (
                f"No win is proven {where}: {best.label} has {values} of {baseline.label}, the strongest "
                "baseline, but no interval of the difference was measured."
            )
        return (
            f"No method beats {baseline.label}, the strongest baseline, {where}: {best.label} has {values}."
        )
    numbers = f"{values}, {difference(evaluation, compared)}"
    if compared.wins:
        return f"{capital(best.label)} beats {baseline.label}, the strongest baseline, {where}: {numbers}."
    if compared.loses:
        return (
            f"No method beats {baseline.label}, the strongest baseline, {where}: {best.label} has {numbers}."
        )
    return (
        f"No method’s win over {baseline.label}, the strongest baseline, is certain {where}: "
        f"{best.label} has {numbers}, and this interval includes zero."
    )


def comparison(evaluation: Evaluation, method: Standing, baseline: Standing) -> Comparison | None:
    """Return the comparison of a method and a baseline; None if it was not measured."""
    if evaluation.bootstrap is None:
        return None
    return evaluation.bootstrap.find(method.method, method.steps, baseline.method, evaluation.error)


def difference(evaluation: Evaluation, compared: Comparison) -> str:
    """Format a difference, its interval, and how it was found, as part of a sentence."""
    bootstrap = evaluation.bootstrap
    assert bootstrap is not None
    return (
        f"difference {compared.difference:+.3f} [{compared.low:+.3f}, {compared.high:+.3f}] over "
        f"{evaluation.data.cold_tasks:,} tasks (paired bootstrap of tasks, {bootstrap.resamples:,} draws, "
        f"{bootstrap.level:.0%} interval)"
    )


def reason(evaluation: Evaluation) -> str:
    """Say what the best method owes its place to.

    If it is best after some steps, the sentence credits the steps, provided that the error before them is
    higher. If it is best before any step, the sentence credits what it has learnt from the features.
    """
    found = _rivals(evaluation)
    if found is None:
        return ""
    best, baseline = found
    compared = comparison(evaluation, best, baseline)
    if compared is not None and compared.wins:
        return f"The reason: {_ahead(evaluation, best)}."
    return f"The reason: {_behind(evaluation, best)}."


def _rivals(evaluation: Evaluation) -> tuple[Standing, Standing] | None:
    """Return the best method and the strongest baseline by the evaluation's error."""
    order = standings(evaluation, evaluation.error)
    trained = [standing for standing in order if standing.adapts]
    simple = [standing for standing in order if not standing.adapts]
    return (trained[0], simple[0]) if trained and simple else None


def _ahead(evaluation: Evaluation, best: Standing) -> str:
    before = evaluation.spread(best.method, 0, evaluation.error)
    if best.steps == 0 or not before.defined or level(before, best.spread):
        return "what it has learnt of the features holds for new tasks too, whose own rows add little to it"
    steps = (
        "one step on a task’s own rows takes"
        if best.steps == 1
        else f"{best.steps} steps on a task’s own rows take"
    )
    return f"{steps} it there from {before.mean:.3f}"


def _behind(evaluation: Evaluation, best: Standing) -> str:
    tasks = f"{evaluation.data.warm_tasks:,} tasks"
    before = evaluation.spread(best.method, 0, evaluation.error)
    if best.steps and before.defined and not level(before, best.spread):
        return (
            f"its steps, from {before.mean:.3f}, end no further down than what the baseline takes from the "
            f"rows of {tasks}"
        )
    return f"its steps on a task’s own rows don’t help, and {tasks} have taught it no more than the baseline"
