"""Batches of tasks as the rows that baselines see, and what baselines say in the unit of methods' outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from gmeta.experiment.baselines.task_rows import Floats, ItemNumbers, Rows, Tasks

SIDES = ("support", "query")


def read_tasks(batches: Iterable[Mapping[str, Any]], item: str | None, positive: float | None) -> Tasks:
    """Collect the rows of all batches; items keep their ids.

    Args:
      batches: Batches as `gmeta.io.tasks` yields them.
      item: The column of items; None: all rows belong to one item.
      positive: A label of at least this value counts as 1, any other as 0. None: labels stay as they are.
    """
    parts: dict[str, list[list[Any]]] = {side: [[], [], []] for side in SIDES}
    for batch in batches:
        labels = _labels(batch["label"], positive)
        items = np.zeros(len(labels), np.int64) if item is None else np.asarray(batch["features"][item])
        for side, found in parts.items():
            mask = batch[side]["mask"].numpy() > 0
            index = batch[side]["index"].numpy()[mask]
            for values, each in zip(found, (items[index], labels[index], mask.sum(axis=1)), strict=True):
                values.append(each)
    return Tasks(*(_rows(*parts[side]) for side in SIDES))


def read_whole(
    elements: Iterable[Mapping[str, Any]], item: str | None, label: str, positive: float | None
) -> Rows:
    """Collect the rows of tasks that aren't cut; items keep their ids.

    Args:
      elements: Elements as `gmeta.io.groups` yields them.
      item: As in `read_tasks`.
      label: The column to predict.
      positive: As in `read_tasks`.
    """
    found: list[list[Any]] = [[], [], []]
    for element in elements:
        labels = _labels(element["columns"][label], positive)
        items = np.zeros(len(labels), np.int64) if item is None else np.asarray(element["columns"][item])
        for values, each in zip(found, (items, labels, np.diff(element["row_splits"])), strict=True):
            values.append(each)
    return _rows(*found)


def _labels(labels: Any, positive: float | None) -> Floats:
    values = np.asarray(labels, np.float64)
    return values if positive is None else (values >= positive).astype(np.float64)


def _rows(items: list[Any], labels: list[Any], sizes: list[Any]) -> Rows:
    splits = np.cumsum(np.concatenate([[0], *sizes])).astype(np.int64)
    return Rows(
        np.concatenate([np.zeros(0, np.int64), *items]), np.concatenate([np.zeros(0), *labels]), splits
    )


def number_items(tasks: Tasks, numbers: ItemNumbers) -> Tasks:
    """Replace items' ids by their numbers."""
    support, query = (
        Rows(numbers.of(side.items), side.labels, side.row_splits) for side in (tasks.support, tasks.query)
    )
    return Tasks(support, query)


def as_logits(rates: Floats, least: float = 1e-3) -> Floats:
    """Convert rates to logits, clipped to ``least`` and ``1 - least``: few rows make no event certain."""
    cut = np.clip(rates, least, 1 - least)
    return np.log(cut) - np.log1p(-cut)
