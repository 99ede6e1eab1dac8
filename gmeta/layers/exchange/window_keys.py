"""Routes the keys of a batch whose step computes one micro-batch after another.

A step changes no row before its end, so a row that several micro-batches of a batch look up needs to travel
only once: before the first of them, and its gradient after the last. The keys of a table are therefore
divided into classes. The class (f, l) has the keys that micro-batch f is the first to look up, and l the
last. With N micro-batches there are N (N + 1) / 2 classes, at most 36.

In the exchange of keys each class is a table of its own (`gmeta.ops.key_messages.route_keys`). Its message
says how many keys of each class follow, so both ends know what each exchange of rows and of gradients
carries, and the keys travel once per batch. A key may come from several ranks in several classes. The owner
collects those of all classes and looks up each key once, so a lookup has the effects that it has on a whole
batch. In groups of ranks, owners exchange these collected keys (`gmeta.layers.exchange.pieces`), once per
batch.

Micro-batch i computes on the rows of all classes with f <= i <= l, one class after another. That holds a row
which it passes over between two uses, and saves a second numbering of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from gmeta.core import collectives
from gmeta.layers.exchange.fetch import Fetch
from gmeta.layers.exchange.pieces import SentKeys, join_keys, send_in_group
from gmeta.ops.distinct import CollectedKeys, classify_keys, collect_keys, move_places
from gmeta.ops.key_messages import OwnedKeys

MOST_MICRO_BATCHES = 8


class KeyClass(NamedTuple):
    """The keys that micro-batch `first` is the first to look up, and `last` the last."""

    first: int
    last: int

    def is_open(self, number: int) -> bool:
        """Return whether the rows of these keys are at hand while a micro-batch computes."""
        return self.first <= number <= self.last


def key_classes(micro_batches: int) -> list[KeyClass]:
    """Return all classes, in the order in which they are numbered."""
    every = range(micro_batches)
    return [KeyClass(first, last) for first in every for last in every if first <= last]


class WindowKeys(NamedTuple):
    """The keys of a lookup of a batch in micro-batches.

    Attributes:
      keys: For each table and class (u,) int64, the distinct keys.
      places: For each micro-batch and table (n,) int32: the place of each requested key among the keys of the
        classes that are open, one class after another.
      owned: For each table (v,) int64: the distinct keys that this rank looks up, of all classes.
      sources: For each table and class (w,) int32, the places among ``owned`` of the keys that were received,
        in wire order; () on one rank.
      sent: The keys' exchange, with a column for each table and class, and ``sent.joined`` with one for each
        table; None if this rank has all rows itself.
    """

    keys: tuple[tuple[tf.Tensor, ...], ...]
    places: tuple[tuple[tf.Tensor, ...], ...]
    owned: tuple[tf.Tensor, ...]
    sources: tuple[tuple[tf.Tensor, ...], ...]
    sent: SentKeys | None

    def exchange_of(self, chosen: Sequence[int]) -> SentKeys:
        """Return the exchange of only some classes within the group of ranks.

        `exchange_values` and `exchange_gradients` take it.
        """
        assert self.sent is not None
        routed, owned, _ = self.sent
        classes = len(self.keys[0])
        columns = [table * classes + each for table in range(len(self.keys)) for each in chosen]
        return SentKeys(
            routed._replace(
                keys=tuple(routed.keys[column] for column in columns),
                counts=_columns(routed.counts, columns),
                inverse=(),
            ),
            owned._replace(
                keys=(),
                positions=tuple(of_table[each] for of_table in self.sources for each in chosen),
                counts=_columns(owned.counts, columns),
                wire_keys=tuple(owned.wire_keys[column] for column in columns),
            ),
        )


def request_window(
    fetch: Fetch, keys: Sequence[Sequence[tf.Tensor]], samples: tf.Tensor | int = 0
) -> WindowKeys:
    """Find the classes of the keys, and send the keys to their owners. The tables don't change.

    Keys are classified and collected in host memory, and travel from there, also those of tables on a GPU.

    Args:
      fetch: The lookup.
      keys: For each micro-batch and each table (n,) int64.
      samples: The number of samples in this rank's batch, which all ranks learn.
    """
    found = [classify_keys(parts) for parts in zip(*keys, strict=True)]
    if collectives.world().size == 1:
        return WindowKeys(
            tuple(each.by_class for each in found),
            _by_micro_batch([each.places for each in found]),
            tuple(tf.concat(each.by_class, axis=0) for each in found),
            (),
            None,
        )
    of_all = [part for each in found for part in each.by_class]
    sent = send_in_group(of_all, samples=samples, name=fetch.name)
    wire, within = (_by_table(each, len(found)) for each in (sent.routed.keys, sent.routed.inverse))
    owned = [_collect(sent.owned, table, len(found)) for table in range(len(found))]
    if collectives.world().groups > 1:
        joined = join_keys([each.distinct for each in owned], sent.owned.notes, name=fetch.name)
        sent = sent._replace(owned=sent.owned._replace(notes=joined.notes), joined=joined)
        owned = [
            CollectedKeys(keys, tuple(tf.gather(places, each) for each in own.places))
            for keys, places, own in zip(joined.keys, joined.places, owned, strict=True)
        ]
    return WindowKeys(
        tuple(wire),
        _by_micro_batch([move_places(new, each.places) for each, new in zip(found, within, strict=True)]),
        tuple(each.distinct for each in owned),
        tuple(each.places for each in owned),
        sent,
    )


def _collect(owned: OwnedKeys, table: int, tables: int) -> CollectedKeys:
    """Collect the distinct keys that came in any class, and the place among them of each received key."""
    keys, positions = (_by_table(each, tables)[table] for each in (owned.keys, owned.positions))
    return collect_keys(keys, positions)


def _by_table(columns: Sequence[tf.Tensor], tables: int) -> list[tuple[tf.Tensor, ...]]:
    classes = len(columns) // tables
    return [tuple(columns[table * classes : (table + 1) * classes]) for table in range(tables)]


def _by_micro_batch(places: Sequence[Sequence[tf.Tensor]]) -> tuple[tuple[tf.Tensor, ...], ...]:
    return tuple(zip(*places, strict=True))


def _columns(counts: tf.Tensor, columns: Sequence[int]) -> tf.Tensor:
    with tf.device("CPU:0"):
        return tf.gather(counts, columns, axis=1)
