"""Sums the gradients of a frozen window's rows, and sends each sum once to the row's owner.

The gradients of a class of keys (`gmeta.layers.exchange.window_keys`) are summed in the order of
micro-batches, so a step is the same in every run. It equals the undivided step up to the rounding of sums.

A key may be without a gradient in some micro-batches, or in all, and then its row must stay as it is. As in
`gmeta.layers.exchange.groups`, a row of negative zeros stands for none; the sum of two is one again.

In groups of ranks, owners sum the gradients of all classes and exchange them (`gmeta.layers.exchange.groups`)
after the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import tensorflow as tf

from gmeta.core import collectives
from gmeta.layers.exchange.ahead import Fetched
from gmeta.layers.exchange.groups import CameGradient, OwnedGradient, by_key, join_gradients, present
from gmeta.layers.exchange.pieces import exchange_gradients
from gmeta.layers.exchange.recorded_lookups import TableGradient, by_table
from gmeta.layers.exchange.window_keys import KeyClass, WindowKeys, key_classes
from gmeta.ops.table.finite import NamedGradient

_Table = tuple[int, int]  # the numbers of a lookup, and of one of its tables


def leaves_after(keys: KeyClass) -> int:
    """Return the micro-batch after which the gradients of a class go to the rows' owners."""
    return keys.last


class WindowGradients:
    """The gradients of the rows of a step's lookups.

    Args:
      lookups: What is known of each lookup.
      micro_batches: Their number.
    """

    def __init__(self, lookups: Sequence[Fetched], micro_batches: int) -> None:
        self._fetches = [each.fetch for each in lookups]
        self._keys: list[WindowKeys] = [each.requested for each in lookups]
        self._classes = key_classes(micro_batches)
        self._sums: dict[tuple[int, int, int], tf.Tensor] = {}  # by lookup, table and class
        self._slices: dict[_Table, bool] = {}  # whether keys may be without a gradient
        self._own: dict[_Table, list[OwnedGradient]] = {}
        self._arrived: dict[_Table, dict[int, OwnedGradient]] = {}  # by class

    @property
    def arrived(self) -> list[tf.Tensor]:
        """All gradients that have come from other ranks."""
        return [each.values for parts in self._arrived.values() for each in parts.values()]

    def add(
        self,
        micro_batch: int,
        gradients: Sequence[tuple[_Table, tf.Tensor | tf.IndexedSlices | None]],
    ) -> None:
        """Add a micro-batch's gradients of the rows that it was handed.

        Args:
          micro_batch: The micro-batch.
          gradients: Tables of lookups, and the sums over samples of their rows' gradients.
        """
        open_ = [index for index, each in enumerate(self._classes) if each.is_open(micro_batch)]
        for table, gradient in gradients:
            lookup, place = table
            slices = isinstance(gradient, tf.IndexedSlices) or self._slices.get(table, False)
            self._slices[table] = slices
            if gradient is None:
                continue
            keys = self._keys[lookup].keys[place]
            parts = tf.split(by_key(gradient), [tf.size(keys[each]) for each in open_], num=len(open_))
            for each, part in zip(open_, parts, strict=True):
                before = self._sums.get((lookup, place, each))
                self._sums[lookup, place, each] = part if before is None else before + part

    def send(self, micro_batch: int) -> None:
        """Send the sums that a micro-batch is the last to add to; one exchange carries all lookups."""
        chosen = [index for index, each in enumerate(self._classes) if leaves_after(each) == micro_batch]
        for table in self._slices:
            lookup, place = table
            keys = self._keys[lookup].keys[place]
            for each in chosen:
                if (lookup, place, each) in self._sums:
                    own = OwnedGradient(keys[each], self._sums[lookup, place, each])
                    self._own.setdefault(table, []).append(own)
        if collectives.world().size == 1:
            return
        lookups = dict.fromkeys(lookup for lookup, _ in self._own)
        for wire_dtype in dict.fromkeys(self._fetches[n].wire_dtype for n in lookups):
            alike = [n for n in lookups if self._fetches[n].wire_dtype == wire_dtype]
            columns = [[(n, t, c) for t in range(len(self._keys[n].keys)) for c in chosen] for n in alike]
            owned = exchange_gradients(
                [self._keys[n].exchange_of(chosen) for n in alike],
                [[self._sums.get(column) for column in of_lookup] for of_lookup in columns],
                wire_dtype=wire_dtype,
                name=f"step/{micro_batch}",
            )
            for of_lookup, came in zip(columns, owned, strict=True):
                for (n, t, c), part in zip(of_lookup, came, strict=True):
                    if part is not None:
                        self._arrived.setdefault((n, t), {})[c] = part

    def sums(self) -> list[tf.Tensor]:
        """Return the sums of this rank's gradients, (u, dim) for each table of each lookup that has any."""
        return [tf.concat([each.values for each in parts], axis=0) for parts in self._own.values()]

    def named(self, gradients: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> list[NamedGradient]:
        """Return this rank's gradients, which are made of `sums`, with their keys."""
        return [
            NamedGradient(
                self._fetches[lookup].tables[place],
                gradient,
                partial(_keys_of, parts),
            )
            for ((lookup, place), parts), gradient in zip(self._own.items(), gradients, strict=True)
        ]

    def by_table(self, gradients: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> list[TableGradient]:
        """Group gradients by physical table; see `FrozenWindow.by_table`."""
        alone = collectives.world().size == 1
        arrived = {table: list(by_class.values()) for table, by_class in self._arrived.items()}
        parts = self._own if alone else arrived
        with tf.control_dependencies(list(gradients)):
            sums = {} if alone else {t: tf.concat([e.values for e in each], 0) for t, each in parts.items()}
        values = dict(zip(self._own, gradients, strict=True)) if alone else sums
        if collectives.world().groups > 1:
            found = self._join(values)
        else:
            keys = {table: _keys_of(each) for table, each in parts.items()}
            came = {table: OwnedGradient(keys[table], values[table]) for table in parts}
            found = {t: present(each) if self._slices[t] else each for t, each in came.items()}
        return by_table((self._fetches[n].tables[t], found.get((n, t))) for n, t in self._slices)

    def _join(self, values: Mapping[_Table, tf.Tensor]) -> dict[_Table, OwnedGradient]:
        """Exchange the gradients that have arrived between groups of ranks."""
        found: dict[_Table, OwnedGradient] = {}
        for wire_dtype in dict.fromkeys(self._fetches[lookup].wire_dtype for lookup, _ in values):
            alike = [each for each in values if self._fetches[each[0]].wire_dtype == wire_dtype]
            came = [self._came(table, values[table]) for table in alike]
            found.update(zip(alike, join_gradients(came, wire_dtype=wire_dtype, name="step"), strict=True))
        return found

    def _came(self, table: _Table, values: tf.Tensor) -> CameGradient:
        """Describe all gradients that have arrived for a table of a lookup."""
        lookup, number = table
        keys = self._keys[lookup]
        assert keys.sent is not None
        assert keys.sent.joined is not None
        places = tf.concat([keys.sources[number][each] for each in self._arrived[table]], axis=0)
        return CameGradient(keys.sent.joined, number, places, values, self._slices[table])


def _keys_of(parts: Sequence[OwnedGradient]) -> tf.Tensor:
    return tf.concat([each.keys for each in parts], axis=0)
