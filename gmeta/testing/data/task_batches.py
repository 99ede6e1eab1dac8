"""Task batches as plain values, for tests that compare them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf


def plain(element: Any) -> Any:
    """An element as nested lists."""
    if isinstance(element, Mapping):
        return {name: plain(value) for name, value in element.items()}
    return element.to_list() if isinstance(element, tf.RaggedTensor) else element.numpy().tolist()


def rows_by_task(batch: Mapping[str, Any], part: str, column: str = "timestamp") -> dict[int, list[Any]]:
    """Task -> what the feature ``column`` has in the real rows of its ``"support"`` or ``"query"`` set."""
    values, index = batch["features"][column].numpy(), batch[part]["index"].numpy()
    mask = batch[part]["mask"].numpy() > 0
    return {
        task: values[row[real]].tolist()
        for task, row, real in zip(batch["task"].numpy().tolist(), index, mask, strict=True)
    }


def sides_by_task(batches: Iterable[Mapping[str, Any]], column: str = "timestamp") -> dict[str, Any]:
    """`rows_by_task` of both sets, of all batches together."""
    found: dict[str, Any] = {"support": {}, "query": {}}
    for batch in batches:
        for part, rows in found.items():
            rows.update(rows_by_task(batch, part, column))
    return found
