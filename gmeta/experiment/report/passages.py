"""From how many support rows on a method passes each baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gmeta.experiment.report.standing import capital
from gmeta.experiment.results.evaluation import Evaluation
from gmeta.experiment.results.spread import Spread


def passing_size(
    method: Mapping[int, Sequence[float]], baseline: Mapping[int, Sequence[float]]
) -> int | None:
    """Return the number of support rows from which on a method's mean error is below a baseline's.

    Args:
      method: Support rows given -> its error per seed.
      baseline: The same of the baseline, which is given as many rows.

    Returns:
      The least of the sizes that both have, at which and above which the method is ahead; None if it is
      behind at the largest.

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
    """Say of each method which baselines it passes, and from how many support rows on.

    Returns:
      A sentence per method that takes steps; none without curves of both methods and baselines.
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
