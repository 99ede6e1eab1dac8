"""What the recipe reports: test users' GAUC of the epochs that validation users choose, and its spread."""

from __future__ import annotations

import statistics
from typing import Any

Row = dict[str, Any]


def chosen_by(row: Row) -> float:
    """Return what epochs are chosen by: the GAUC of both labels on the validation users."""
    return float(row["validation_gauc_ctr"] + row["validation_gauc_ctcvr"])


def report(rows: list[Row]) -> str:
    """Tell the GAUC on the test users: of the epoch in time that is best on the validation users."""
    best: dict[tuple[str, int, int], Row] = {}
    for row in rows:
        key = row["kind"], row["seed"], row.get("steps", 0)
        before = best.get(key)
        if row.get("in_time", True) and (
            before is None or "validation_gauc_ctr" not in row or chosen_by(row) > chosen_by(before)
        ):
            best[key] = row
    lines = [f"{'':12}seed  steps  epoch  seconds  GAUC ctr  ctcvr"]
    for (kind, seed, steps), row in best.items():
        numbers = f"{seed:4}{steps:7}{row['epoch']:7}{row.get('seconds', 0.0):9.1f}"
        lines.append(f"{kind:12}{numbers}{row['gauc_ctr']:10.4f}{row['gauc_ctcvr']:9.4f}")
    return "\n".join([*lines, *spread(best)])


def spread(best: dict[tuple[str, int, int], Row]) -> list[str]:
    """Tell the means and standard deviations over seeds, if there are several."""
    of: dict[tuple[str, int], list[Row]] = {}
    for (kind, _, steps), row in best.items():
        of.setdefault((kind, steps), []).append(row)
    lines = []
    for (kind, steps), rows in of.items():
        if len(rows) > 1:
            told = []
            for name in ("gauc_ctr", "gauc_ctcvr"):
                values = [row[name] for row in rows]
                told.append(f"{statistics.mean(values):.4f}±{statistics.stdev(values):.4f}")
            lines.append(f"{kind:12}mean of {len(rows)} seeds, steps {steps}: {'  '.join(told)}")
    return lines
