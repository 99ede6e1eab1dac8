"""The report's sentences, computed from the numbers of an evaluation.

The first one is a verdict by the paired bootstrap over tasks (`gmeta.experiment.results.metrics`). In the
others, two means count as different if they differ by more than the spread over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gmeta.experiment.results.evaluation import Evaluation, Spread
from gmeta.experiment.results.metrics import METRICS, Comparison

# The ranking of methods: the best value of each, and whether two of them are level.
#
# Two means count as different if they differ by more than ``sqrt(s_a^2 + s_b^2)``, the standard deviation of
# the difference of two single runs; ``s`` is the spread over seeds. This isn't a significance test: it keeps
# the report from claiming a difference that another seed could reverse.


@dataclass(frozen=True)
class Standing:
    """The best value of a metric that a method reaches, and the number of steps that it takes."""

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
    return abs(a.mean - b.mean) <= noise + 1e-12  # rounding isn't a difference


def standings(evaluation: Evaluation, metric: str) -> list[Standing]:
    """List every method at its best number of steps, best method first; omit methods without a value."""
    sign = 1.0 if METRICS[metric].better == "lower" else -1.0
    found = []
    for name, method in evaluation.methods.items():
        spreads = {steps: evaluation.spread(name, steps, metric) for steps in sorted(method.results)}
        spreads = {steps: spread for steps, spread in spreads.items() if spread.defined}
        if spreads:
            # The smallest number of steps with the same value to the displayed digits.
            steps = min(spreads, key=lambda steps: round(sign * spreads[steps].mean, 5))
            found.append(Standing(name, method.label, steps, method.adapts, spreads[steps]))
    return sorted(found, key=lambda standing: sign * standing.spread.mean)


def change(before: Spread, now: Spread) -> str:
    """Describe a change, as in ``"falls from 1.001 to 0.917"``, or state that the value hardly changes."""
    if level(before, now):
        return f"hardly moves, from {before.mean:.3f} to {now.mean:.3f}"
    return f"{'falls' if now.mean < before.mean else 'rises'} from {before.mean:.3f} to {now.mean:.3f}"


def capital(text: str) -> str:
    """Capitalise the first letter of the text, and leave the rest unchanged."""
    return text[:1].upper() + text[1:]


# The report's first sentence: whether a method beats the strongest baseline, by the paired bootstrap.


def verdict(evaluation: Evaluation) -> str:
    """State whether the best method beats the strongest baseline, with the interval of the difference.

    A difference is a win or a defeat if its interval excludes zero (`gmeta.experiment.results.metrics`).

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
    order = _order(evaluation, best, baseline)
    if compared.wins:
        beats = f"{capital(best.label)} beats {baseline.label}, the strongest baseline"
        return f"{beats}, {where}: {numbers}{order}."
    if compared.loses:
        return (
            f"No method beats {baseline.label}, the strongest baseline, {where}: {best.label} has "
            f"{numbers}{order}."
        )
    return (
        f"No method’s win over {baseline.label}, the strongest baseline, is certain {where}: "
        f"{best.label} has {numbers}, and this interval includes zero{order}."
    )


def _order(evaluation: Evaluation, best: Standing, baseline: Standing) -> str:
    """Compare how well both order rows, as part of a sentence; empty if that wasn't measured."""
    parts = []
    for metric in ("auc", "gauc"):
        both = [evaluation.spread(each.method, each.steps, metric) for each in (best, baseline)]
        if all(spread.defined for spread in both):
            parts.append(f"{METRICS[metric].label} {both[0].mean:.3f} against {both[1].mean:.3f}")
    return f"; {', '.join(parts)}" if parts else ""


def comparison(evaluation: Evaluation, method: Standing, baseline: Standing) -> Comparison | None:
    """Return the comparison of a method and a baseline; None if it was not measured."""
    if evaluation.bootstrap is None:
        return None
    return evaluation.bootstrap.find(method.method, method.steps, baseline.method, evaluation.error)


def difference(evaluation: Evaluation, compared: Comparison) -> str:
    """Format a difference, its interval, and how it was computed, as part of a sentence."""
    bootstrap = evaluation.bootstrap
    assert bootstrap is not None
    return (
        f"difference {compared.difference:+.3f} [{compared.low:+.3f}, {compared.high:+.3f}] over "
        f"{evaluation.data.cold_tasks:,} tasks (paired bootstrap of tasks, {bootstrap.resamples:,} draws, "
        f"{bootstrap.level:.0%} interval)"
    )


def reason(evaluation: Evaluation) -> str:
    """State why the best method is first.

    If it is best after some steps and its error before them is higher, the sentence credits the steps. If it
    is best before any step, the sentence credits what it learned from the features.
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


# The least number of support rows with which a method beats each baseline.


def passing_size(
    method: Mapping[int, Sequence[float]], baseline: Mapping[int, Sequence[float]]
) -> int | None:
    """Return the least number of support rows from which a method's mean error is below a baseline's.

    Args:
      method: Support rows given -> its error per seed.
      baseline: The same for the baseline, which is given as many rows.

    Returns:
      The least common size at which, and above which, the method is ahead; None if it is behind at the
      largest common size.

    Example:
      >>> passing_size({1: [0.9], 4: [0.7], 16: [0.6]}, {1: [0.8], 4: [0.8], 16: [0.7]})
      4
    """
    found = None
    for size in sorted(set(method) & set(baseline), reverse=True):
        ours, theirs = Spread.of(method[size]), Spread.of(baseline[size])
        if not (ours.defined and theirs.defined and ours.mean < theirs.mean):
            break
        found = size
    return found


def passage_sentences(evaluation: Evaluation) -> list[str]:
    """State for each method which baselines it beats, and from which number of support rows.

    Returns:
      A sentence per method that takes steps; empty without curves of both methods and baselines.
    """
    curves = evaluation.support_curve
    simple = [name for name in curves if not evaluation.methods[name].adapts]
    sentences = []
    for name, method in evaluation.methods.items():
        shared = [other for other in simple if len(set(curves.get(name, ())) & set(curves[other])) > 1]
        if not method.adapts or not shared:
            continue
        most = max(curves[name])
        passed: dict[int, list[str]] = {}
        never = []
        for other in shared:
            size = passing_size(curves[name], curves[other])
            if size is None:
                never.append(evaluation.methods[other].label)
            else:
                passed.setdefault(size, []).append(evaluation.methods[other].label)
        parts = [f"{_join(labels)} from {_rows(size)} on" for size, labels in sorted(passed.items())]
        said = f"passes {_join(parts)}" if parts else ""
        if never:
            said += ("; it " if said else "") + f"doesn’t pass {_join(never, 'or')} with up to {_rows(most)}"
        sentences.append(f"{capital(method.label)} {said}.")
    return sentences


def _rows(size: int) -> str:
    return "1 support row" if size == 1 else f"{size} support rows"


def _join(words: Sequence[str], last: str = "and") -> str:
    return f" {last} ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def headline(evaluation: Evaluation) -> list[str]:
    """Write the report's opening: the verdict and its reason, the effect of adaptation, the best methods."""
    parts = (verdict, reason, adaptation, lowest_error, ranking)
    sentences = [*(part(evaluation) for part in parts), *passage_sentences(evaluation), caution(evaluation)]
    return [sentence for sentence in sentences if sentence]


def adaptation(evaluation: Evaluation) -> str:
    """State how the first step changes the error of the first method that adapts; empty without one."""
    metric = evaluation.error
    for name, method in evaluation.methods.items():
        steps = [n for n in sorted(method.results) if evaluation.spread(name, n, metric).defined]
        if len(steps) > 1 and steps[0] == 0:
            before, now = (evaluation.spread(name, n, metric) for n in steps[:2])
            where = f"{method.label}’s {METRICS[metric].label} on {evaluation.data.split} tasks"
            return f"{capital(after(steps[1]))}, {where} {change(before, now)}."
    return ""


def lowest_error(evaluation: Evaluation) -> str:
    """State which method has the lowest error, and whether the second-best is clearly behind it."""
    order = standings(evaluation, evaluation.error)
    if len(order) < 2:
        return ""
    first, second, *others = order
    metric = METRICS[evaluation.error].label
    sentence = f"{capital(first.label)} reaches the lowest {metric}, {first.spread.mean:.3f}{first.where}"
    runner_up = f"{second.label} ({second.spread.mean:.3f}{second.where})"
    if level(first.spread, second.spread):
        sentence += f", but {runner_up} is level with it"
        if len(evaluation.seeds) > 1:
            sentence += " within the spread between seeds"
    else:
        sentence += f", ahead of {runner_up}"
    if others:
        sentence += "; " + ", ".join(f"{other.label}: {other.spread.mean:.3f}" for other in others)
    return sentence + "."


def ranking(evaluation: Evaluation) -> str:
    """State which method ranks a task's items best, by AUC, GAUC and nDCG@3."""
    parts = []
    for metric in ("auc", "gauc", "ndcg@3"):
        order = standings(evaluation, metric)
        if len(order) < 2:
            continue
        first, second = order[:2]
        verdict = "is level with" if level(first.spread, second.spread) else "is ahead of"
        parts.append(
            f"by {METRICS[metric].label}, {first.label} ({first.spread.mean:.3f}{first.where}) {verdict} "
            f"{second.label} ({second.spread.mean:.3f}{second.where})"
        )
    return capital("; ".join(parts)) + "." if parts else ""


def caution(evaluation: Evaluation) -> str:
    """Warn that one seed can't show a small difference; empty if there are several seeds."""
    if len(evaluation.seeds) > 1:
        return ""
    return "This is one seed: the spread between seeds is unknown, and small differences prove nothing."
