"""The attributes of items, collected from the batches that methods and baselines are measured on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.experiment.baselines.attribute_levels import ItemAttributes
from gmeta.experiment.baselines.task_rows import Floats, Ints, ItemNumbers
from gmeta.experiment.plan.experiment_config import ExperimentConfig
from gmeta.experiment.runs.model_choice import experiment_features, task_columns

MOST_CHANGED = 0.05
"""If items have other values in a larger share of the batches that meet them again, a column isn't theirs."""


class AttributeReader:
    """Collects what batches say of items.

    Args:
      item: The column of items; None: there are no items, and so no attributes.
      columns: Columns of ids, or of lists of ids, that may be attributes of items.

    Example:
      >>> reader = AttributeReader("item", ["genre"])
      >>> items, genres = tf.constant([5, 9, 5]), tf.ragged.constant([[1], [1, 2], [1]])
      >>> for batch in reader.watch([{"features": {"item": items, "genre": genres}}]):
      ...     pass
      >>> reader.attributes(ItemNumbers(np.array([5]), np.array([9]))).columns["genre"].shape
      (2, 2)
    """

    def __init__(self, item: str | None, columns: Sequence[str]) -> None:
        self.item = item
        self._items: list[Ints] = []
        self._columns: dict[str, list[tuple[Ints, Ints]]] = {} if item is None else {c: [] for c in columns}

    @classmethod
    def of(cls, config: ExperimentConfig) -> AttributeReader:
        """Read the embedded columns except the item's and the tasks' own; columns of numbers are left out."""
        own = (config.item, *task_columns(config))
        return cls(config.item, [each.name for each in experiment_features(config) if each.name not in own])

    def watch(
        self, batches: Iterable[Mapping[str, Any]], key: str = "features"
    ) -> Iterator[Mapping[str, Any]]:
        """Hand batches through, and keep the attributes of each one's items.

        Args:
          batches: Batches of tasks, or elements of `gmeta.io.groups`.
          key: What has the columns: ``"features"`` of the former, ``"columns"`` of the latter.
        """
        for batch in batches:
            if self._columns:
                items, first = np.unique(np.asarray(batch[key][self.item]), return_index=True)
                self._items.append(items)
                for name, found in self._columns.items():
                    found.append(_values(tf.gather(batch[key][name], first)))
            yield batch

    def attributes(self, numbers: ItemNumbers) -> ItemAttributes | None:
        """Return the attributes of all numbered items; None if no column is an attribute of items.

        An item has the values with which it was met first. A column whose values change from place to place,
        such as a user's city or the hour of a row, is left out.
        """
        if not self._items:
            return None
        ids, first, again = np.unique(np.concatenate(self._items), return_index=True, return_inverse=True)
        met = np.arange(len(again)) != first[again]
        rows = first[np.searchsorted(ids, numbers.ids)]
        kept = {}
        for name, found in self._columns.items():
            values, counts = (np.concatenate(each) for each in zip(*found, strict=True))
            mark = _mark(values, counts)
            if np.count_nonzero(mark != mark[first[again]]) <= MOST_CHANGED * np.count_nonzero(met):
                kept[name] = _choose(values, counts, rows)
        return ItemAttributes.of(kept) if kept else None


def _values(column: tf.Tensor | tf.RaggedTensor) -> tuple[Ints, Ints]:
    """Return a column's values, row after row, and how many each row has."""
    if isinstance(column, tf.RaggedTensor):
        return column.flat_values.numpy(), column.row_lengths().numpy()
    values = np.asarray(column)
    return values.ravel(), np.full(len(values), values.size // max(len(values), 1))


def _mark(values: Ints, counts: Ints) -> Floats:
    """Compute a number for each row that is the same for the same values, in any order."""
    mixed = (values.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)
    return np.bincount(np.repeat(np.arange(len(counts)), counts), mixed, len(counts)).astype(np.float64)


def _choose(values: Ints, counts: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """Return the values and counts of some rows."""
    start, chosen = np.cumsum(counts) - counts, counts[rows]
    end = np.cumsum(chosen)
    return values[np.arange(chosen.sum()) + np.repeat(start[rows] - (end - chosen), chosen)], chosen
