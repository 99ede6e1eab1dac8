"""Brings the rows of a frozen window: each row once, before the first micro-batch that uses it."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from gmeta.core import collectives
from gmeta.layers.exchange.ahead import Fetched, hear_samples
from gmeta.layers.exchange.fetch import Requested
from gmeta.layers.exchange.pieces import SentKeys, exchange_values
from gmeta.layers.exchange.window.keys import WindowKeys, key_classes


class WindowRows:
    """The rows of a step's lookups.

    Args:
      lookups: What is known of each lookup.
      micro_batches: Their number.
    """

    def __init__(self, lookups: Sequence[Fetched], micro_batches: int) -> None:
        self._fetches = [each.fetch for each in lookups]
        self._keys: list[WindowKeys] = [each.requested for each in lookups]
        self._peeked = [each.peeked for each in lookups]
        self._classes = key_classes(micro_batches)
        self._owned: dict[int, tuple[tf.Tensor, ...]] = {}  # by lookup: the rows that ranks ask for
        self._rows: dict[tuple[int, int, int], tf.Tensor] = {}  # by lookup, table and class

    @property
    def arrived(self) -> list[tf.Tensor]:
        """All rows that have been asked for."""
        return list(self._rows.values())

    def look_up(self, number: int, insert: bool | tf.Tensor) -> None:
        """Read the rows of a lookup for all micro-batches, with the effects of a whole batch's lookup."""
        keys = self._keys[number]
        hear_samples(keys)
        self._owned[number] = rows = self._fetches[number].look_up(keys, insert, self._peeked[number])
        if keys.sent is None:
            for table, own in enumerate(keys.keys):
                parts = tf.split(rows[table], [tf.size(each) for each in own], num=len(own))
                self._rows.update({(number, table, index): part for index, part in enumerate(parts)})

    def send(self, micro_batch: int, numbers: Sequence[int]) -> None:
        """Exchange the rows of some lookups that a micro-batch is the first to use.

        One exchange carries all lookups, unless they differ in wire dtype or place.
        """
        chosen = [index for index, each in enumerate(self._classes) if each.first == micro_batch]
        if collectives.world().size == 1 or not chosen:
            return
        kinds: dict[tuple[tf.DType, str], list[int]] = {}
        for number in numbers:
            fetch = self._fetches[number]
            kinds.setdefault((fetch.wire_dtype, fetch.place), []).append(number)
        for alike in kinds.values():
            columns = [(n, t, c) for n in alike for t in range(len(self._owned[n])) for c in chosen]
            fetch = self._fetches[alike[0]]
            rows = exchange_values(
                _side_by_side([self._keys[n].exchange_of(chosen) for n in alike]),
                [self._owned[n][t] for n, t, _ in columns],
                [self._fetches[n].tables[t].dim for n, t, _ in columns],
                wire_dtype=fetch.wire_dtype,
                device=fetch.place,
                name=f"{fetch.name}/{micro_batch}",
            )
            self._rows.update(zip(columns, rows, strict=True))

    def hand_out(
        self, number: int, micro_batch: int, after: Sequence[tf.Tensor]
    ) -> tuple[Requested, tuple[tf.Tensor, ...]]:
        """Return the keys and rows of a lookup that are at hand in a micro-batch.

        Args:
          number: The lookup.
          micro_batch: The micro-batch.
          after: Tensors that are computed before.
        """
        keys = self._keys[number]
        open_ = [index for index, each in enumerate(self._classes) if each.is_open(micro_batch)]
        with tf.control_dependencies(list(after)):
            rows = tuple(
                tf.concat([self._rows[number, table, each] for each in open_], axis=0)
                for table in range(len(keys.keys))
            )
        distinct = tuple(tf.concat([own[each] for each in open_], axis=0) for own in keys.keys)
        return Requested(distinct, keys.places[micro_batch], None), rows


def _side_by_side(sent: Sequence[SentKeys]) -> SentKeys:
    """Put the columns of several exchanges side by side, for `exchange_values`."""
    first = sent[0]
    if len(sent) == 1:
        return first
    with tf.device("CPU:0"):
        routed = tf.concat([each.routed.counts for each in sent], axis=1)
        owned = tf.concat([each.owned.counts for each in sent], axis=1)
    positions = tuple(part for each in sent for part in each.owned.positions)
    return SentKeys(
        first.routed._replace(counts=routed), first.owned._replace(counts=owned, positions=positions)
    )
