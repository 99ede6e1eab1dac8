"""The table of differences between methods and baselines, with their intervals."""

from __future__ import annotations

from gmeta.experiment.report.standing import standings
from gmeta.experiment.results.bootstrap import Comparison
from gmeta.experiment.results.evaluation import Evaluation
from gmeta.experiment.results.metrics import ERRORS, METRICS

_ALSO = ("rmse",)  # errors that are compared beside the one that decides


def difference_header(evaluation: Evaluation) -> list[str]:
    """Return the titles of the columns: the errors that are compared."""
    return [METRICS[metric].label for metric in _compared(evaluation)]


def difference_rows(evaluation: Evaluation) -> list[tuple[str, str, list[tuple[str, bool]]]]:
    """Return the table's lines: method, baseline, and each error's difference.

    Each method is taken at its best number of steps, as in the report's sentences.

    Returns:
      Method with its steps, baseline, and for each error the difference with its interval as text, and
      whether it is a win.
    """
    bootstrap = evaluation.bootstrap
    if bootstrap is None:
        return []
    order = standings(evaluation, evaluation.error)
    lines = []
    for method in (standing for standing in order if standing.adapts):
        for baseline in (standing for standing in order if not standing.adapts):
            found = [
                bootstrap.find(method.method, method.steps, baseline.method, metric)
                for metric in _compared(evaluation)
            ]
            cells = [(_text(one), one.wins) if one else ("–", False) for one in found]
            lines.append((f"{method.label}{method.where}", baseline.label, cells))
    return lines


def _compared(evaluation: Evaluation) -> list[str]:
    return [metric for metric in evaluation.metrics if metric in (*ERRORS, *_ALSO)]


def _text(one: Comparison) -> str:
    return f"{one.difference:+.3f} [{one.low:+.3f}, {one.high:+.3f}]"
