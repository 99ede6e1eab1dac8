"""Negatives drawn while data are read: rows with items that a user doesn't have, and the label 0."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gmeta.core.errors import ConfigError, whole_number
from gmeta.core.schema import Schema
from gmeta.io.readers.group_reader import groups
from gmeta.io.readers.read_options import OneEpoch, ReadOptions

Law = Literal["uniform", "popularity", "in-batch"]
_TRIES = 16
_GROUPS = 256  # per element, when the catalogue is read


@dataclass(frozen=True)
class Negatives:
    """Negatives that `gmeta.io.rows` adds to implicit feedback, whose data have only positive rows.

    For each row with a label above 0, copies are added with other items and the label 0. Their items are
    drawn from those of the split, which is read once for this purpose. A draw is a pure function of (seed,
    epoch, the row's group, its place in the group), so a resumed run, on any number of ranks, draws the same
    items as an uninterrupted one; with the law ``"in-batch"``, it also depends on which rows are permuted
    together.

    Attributes:
      item: The column of items, int64.
      count: Number of negatives per positive row.
      law: ``"uniform"``: all items are equally likely; ``"popularity"``: in proportion to their rows in the
        split; ``"in-batch"``: the item of another row among those that are permuted together.
      columns: The other columns that describe the item, such as its genres: a negative copies them from the
        first row with its item. All other columns are those of the positive row.
      known: Whether a negative may be an item of a positive row of its group, which holds all rows of a task
        unless the data were prepared with ``--batch-rows``. If not, such an item is redrawn, at most 16
        times, and then skipped. The law's proportions then hold among the other items.
      seed: The seed of the draws.

    Raises:
      ConfigError: A setting is invalid.

    Example:
      >>> negatives = Negatives("movie_id", count=4, law="popularity", columns=["genres"])
      >>> train = gmeta.io.rows("data/train", negatives=negatives)  # doctest: +SKIP
    """

    item: str
    count: int = 4
    law: Law = "uniform"
    columns: Sequence[str] = ()
    known: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        whole_number("Negatives: count", self.count, least=1)
        whole_number("Negatives: seed", self.seed)
        if self.law not in get_args(Law):
            raise ConfigError(f"Negatives: law must be one of {', '.join(get_args(Law))}, got {self.law!r}")

    def check(self, schema: Schema, label: str) -> None:
        """Check that a split has the columns.

        Raises:
          ConfigError: A column is missing, or unsuitable for its role.
        """
        found = {column.name: column for column in schema}
        missing = [name for name in (self.item, *self.columns) if name not in found]
        if missing:
            raise ConfigError(f"Negatives: no column {', '.join(missing)}; there are {', '.join(found)}")
        if found[self.item].is_list or found[self.item].dtype != "int64":
            raise ConfigError(f"Negatives: item={self.item!r} holds lists or floats: name a column of ids")
        twice = {self.item, label, schema.task} & {*self.columns}
        if twice or self.item in (label, schema.task):
            raise ConfigError(
                f"Negatives: item={self.item!r} and columns={list(self.columns)} can't have the label, the "
                "task or the item among them"
            )

    def add_to(
        self, elements: tf.data.Dataset, path: str | os.PathLike[str], label: str, options: ReadOptions
    ) -> tf.data.Dataset:
        """Add the negatives to elements of `gmeta.io.groups`, after each group's own rows.

        Args:
          elements: The elements.
          path: The split of the elements.
          label: The column of labels.
          options: How the split is read.
        """
        items = _read_items(path, self, options)
        return elements.map(
            lambda element: self._add(element, items, label),
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )

    @tf.autograph.experimental.do_not_convert
    def _add(self, element: dict[str, Any], items: _Items, label: str) -> dict[str, Any]:
        columns, splits = element["columns"], element["row_splits"]
        rows = splits[-1]
        group = tf.repeat(tf.range(tf.size(splits, tf.int64) - 1), splits[1:] - splits[:-1])
        places = tf.range(rows) - tf.gather(splits, group)
        positive = tf.where(columns[label] > 0)[:, 0]
        numbers = tf.searchsorted(items.ids, columns[self.item], out_type=tf.int64)
        tries = 1 if self.known else _TRIES
        hashed = _hash([self.seed, element["epoch"]], tf.zeros([1, 1, 1], tf.uint64))
        own = (element["task"], element["batch_id"])
        of_row = [tf.gather(tf.gather(each, group), positive) for each in own] + [tf.gather(places, positive)]
        for part in of_row:
            hashed = _mix(hashed + tf.cast(part, tf.uint64)[:, tf.newaxis, tf.newaxis])
        for part, shape in ((tf.range(self.count), [1, -1, 1]), (tf.range(tries), [1, 1, -1])):
            hashed = _mix(hashed + tf.reshape(tf.cast(part, tf.uint64), shape))
        drawn = self._items(tf.cast(tf.bitwise.right_shift(hashed, _u64(1)), tf.int64), items, numbers)
        of_group = tf.gather(group, positive)
        good = tf.ones_like(drawn, tf.bool)
        if not self.known:
            size = tf.size(items.ids, tf.int64)
            held = tf.sort(of_group * size + tf.gather(numbers, positive))
            keys = of_group[:, tf.newaxis, tf.newaxis] * size + drawn
            place = tf.searchsorted(held, tf.reshape(keys, [-1]), out_type=tf.int64)
            place = tf.minimum(place, tf.maximum(tf.size(held, tf.int64) - 1, 0))
            good = tf.reshape(tf.gather(held, place), tf.shape(keys)) != keys
        first = tf.argmax(tf.cast(good, tf.int32), axis=2)
        chosen = tf.gather(drawn, first, batch_dims=2)
        some = tf.where(tf.reduce_any(good, axis=2))
        number, source = tf.gather_nd(chosen, some), tf.gather(positive, some[:, 0])
        order = tf.argsort(tf.concat([group, tf.gather(group, source)], axis=0), stable=True)
        added = {
            self.item: tf.gather(items.ids, number),
            label: tf.zeros(tf.shape(source), columns[label].dtype),
        }
        added |= {name: tf.gather(items.columns[name], number) for name in self.columns}
        joined = {
            name: tf.gather(
                tf.concat([values, added[name] if name in added else tf.gather(values, source)], axis=0),
                order,
            )
            for name, values in columns.items()
        }
        more = tf.math.bincount(tf.cast(tf.gather(group, source), tf.int32), minlength=tf.size(splits) - 1)
        ends = tf.cumsum(tf.cast(more, tf.int64)[: tf.size(splits) - 1])
        return {
            **element,
            "columns": joined,
            "row_splits": splits + tf.concat([[tf.constant(0, tf.int64)], ends], 0),
        }

    def _items(self, drawn: tf.Tensor, items: _Items, numbers: tf.Tensor) -> tf.Tensor:
        """Map non-negative draws to the numbers of items, by the law."""
        if self.law == "uniform":
            return drawn % tf.size(items.ids, tf.int64)
        if self.law == "in-batch":
            return tf.gather(numbers, drawn % tf.maximum(tf.size(numbers, tf.int64), 1))
        sums = tf.cumsum(items.counts)
        flat = tf.reshape(drawn % sums[-1], [-1])
        return tf.reshape(tf.searchsorted(sums, flat, side="right", out_type=tf.int64), tf.shape(drawn))


class _Items(NamedTuple):
    """The items of a split: ids (V,), ascending; counts (V,) of their rows; and their descriptive columns."""

    ids: tf.Tensor
    counts: tf.Tensor
    columns: Mapping[str, Any]


def _read_items(path: Any, settings: Negatives, options: ReadOptions) -> _Items:
    """Read the items of a split, whole."""
    whole = ReadOptions(shuffle=False, shard=(0, 1), on_bad=options.on_bad)
    found: list[Any] = []
    parts: dict[str, list[Any]] = {name: [] for name in settings.columns}
    for element in groups(path, groups_per_element=_GROUPS, start=OneEpoch(), options=whole):
        found.append(element["columns"][settings.item].numpy())
        for name, values in parts.items():
            values.append(element["columns"][name])
    every: npt.NDArray[np.int64] = np.concatenate(found) if found else np.zeros(0, np.int64)
    ids, first, counts = np.unique(every, return_index=True, return_counts=True)
    columns = {name: tf.gather(tf.concat(values, axis=0), first) for name, values in parts.items()}
    return _Items(tf.constant(ids), tf.constant(counts.astype(np.int64)), columns)


# SplitMix64 (Steele, Lea and Flood, 2014): a hash of 64 bits whose bits are as good as random.


def _u64(value: int) -> tf.Tensor:
    return tf.constant(value, tf.uint64)


def _mix(values: tf.Tensor) -> tf.Tensor:
    found = values + _u64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        found = tf.bitwise.bitwise_xor(found, tf.bitwise.right_shift(found, _u64(shift))) * _u64(factor)
    return tf.bitwise.bitwise_xor(found, tf.bitwise.right_shift(found, _u64(31)))


def _hash(parts: Sequence[Any], start: tf.Tensor) -> tf.Tensor:
    for part in parts:
        start = _mix(start + tf.cast(part, tf.uint64))
    return start
