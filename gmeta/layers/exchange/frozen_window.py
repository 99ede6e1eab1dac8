"""A frozen window: the lookups of a step that computes one micro-batch after another.

Between two updates no row changes, so a step's batch may be computed in micro-batches, with one update at
the end (NestPipe, section V). Each row travels once, before the first micro-batch that uses it, and its
gradient once, after the last one. So N micro-batches exchange what an undivided batch does, and can hide it.
With V for an exchange of rows, C for a micro-batch's computation and G for an exchange of gradients, the
order is ::

    V0  V1  (keys of the next batch)  C0  G0  V2  C1  G1  V3  C2  G2  ...

V[i + 1] and G[i - 1] travel while C[i] computes. All ranks trace their collectives in this order.
Micro-batches compute one after another, so that only one of them takes memory.

The paper sends a key with each micro-batch that uses it, and therefore gathers samples of equal keys in one
micro-batch. Here a key travels once however samples are divided. To gather them
(`gmeta.training.windows`) saves no bytes; it lets fewer rows wait between two micro-batches.

The gradients of a class of keys (`gmeta.layers.exchange.window_keys`) are summed in the order of
micro-batches, so a step is the same in every run, and each sum goes once to the row's owner. It equals the
undivided step up to the rounding of sums. A key may be without a gradient in some micro-batches, or in all,
and then its row must stay as it is. As in `gmeta.layers.exchange.pieces`, a row of negative zeros stands for
none; the sum of two is one again. In groups of ranks, owners sum the gradients of all classes and exchange
them (`gmeta.layers.exchange.pieces.join_gradients`) after the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.errors import ConfigError
from gmeta.core.step import beside_step, step_context
from gmeta.layers.exchange.fetch import Fetch, Fetched, Requested, check_end, check_next, hear_samples
from gmeta.layers.exchange.pieces import (
    CameGradient,
    OwnedGradient,
    SentKeys,
    by_key,
    exchange_gradients,
    exchange_values,
    join_gradients,
    present,
)
from gmeta.layers.exchange.recorded_lookups import (
    RecordedLookups,
    TableGradient,
    by_table,
    current_graph,
)
from gmeta.layers.exchange.window_keys import KeyClass, WindowKeys, key_classes
from gmeta.ops.table.finite import NamedGradient

# Brings the rows of a frozen window: each row once, before the first micro-batch that uses it.


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
        """All rows that have been requested."""
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
        """Return the keys and rows of a lookup that are available in a micro-batch.

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


class FrozenWindow:
    """The lookups of a step in micro-batches.

    For each micro-batch call `begin`, compute it, then call `end`. Its lookups get their rows through
    `gmeta.layers.exchange.fetch.use_fetched`. After the last one `sums` are this rank's gradients, and
    `by_table` the gradients of all ranks for the rows that this rank owns.

    Args:
      lookups: What is known of each lookup; its keys are `WindowKeys`.
      micro_batches: Their number, N.
      then: A function that is called once the rows of the first two micro-batches are requested.
    """

    def __init__(
        self, lookups: Sequence[Fetched], micro_batches: int, then: Callable[[], None] | None = None
    ) -> None:
        self._fetches = [each.fetch for each in lookups]
        self._rows = WindowRows(lookups, micro_batches)
        self._gradients = WindowGradients(lookups, micro_batches)
        self._micro_batches, self._then = micro_batches, then
        self._number, self._made = -1, 0
        self._after: list[tf.Tensor] = []
        self._handed: list[tf.Tensor] = []
        self._graph = current_graph()

    def begin(self, after: Sequence[tf.Tensor]) -> None:
        """Begin the next micro-batch, whose rows are available once the tensors ``after`` are computed."""
        self._number, self._made = self._number + 1, 0
        self._after, self._handed = list(after), []

    def bring(self, fetch: Fetch, insert: bool | tf.Tensor) -> tuple[Requested, tuple[tf.Tensor, ...]]:
        """Return the keys and rows of the micro-batch's next lookup.

        Raises:
          ConfigError: The lookup isn't the one that was foreseen, or is made where its rows can't be.
        """
        if self._number < 0 or self._made == len(self._fetches) or current_graph() is not self._graph:
            raise ConfigError(
                f"pipeline: {fetch.name!r} is looked up where micro-batches can't bring its rows: outside of "
                "the train step's compute_gradients, inside a tf.function, tf.cond or tf.while_loop, or "
                "once more than was foreseen: change the model, or leave micro_batches out"
            )
        number, self._made = self._made, self._made + 1
        check_next(fetch, self._fetches[number], self._made)
        if self._number == 0:
            self._rows.look_up(number, insert)
            self._rows.send(0, [number])
            if self._made == len(self._fetches):
                with beside_step():
                    self._rows.send(1, range(len(self._fetches)))
                if self._then is not None:
                    self._then()
        requested, rows = self._rows.hand_out(number, self._number, self._after)
        self._handed.extend(rows)
        return requested, rows

    def end(
        self, recorded: RecordedLookups, gradients: Sequence[tf.Tensor | tf.IndexedSlices | None]
    ) -> None:
        """End the micro-batch.

        Args:
          recorded: Its lookups.
          gradients: For each of ``recorded.rows`` the sum over the micro-batch's samples, or None.

        Raises:
          ConfigError: The micro-batch has left out a lookup that was foreseen.
        """
        check_end(len(self._fetches), self._fetches[self._made :])
        tables = [(n, t) for n, fetch in enumerate(self._fetches) for t in range(len(fetch.tables))]
        places = {id(rows): table for rows, table in zip(self._handed, tables, strict=True)}
        of_table = [(places[id(rows)], each) for rows, each in zip(recorded.rows, gradients, strict=True)]
        self._gradients.add(self._number, of_table)
        with beside_step():
            self._gradients.send(self._number)
            self._rows.send(self._number + 2, range(len(self._fetches)))
        step = step_context().samples
        if self._number + 1 == self._micro_batches and step is not None:
            # A step that ends the data does so on all ranks after these exchanges.
            step.before_end.extend([*self._rows.arrived, *self._gradients.arrived])

    def end_step(self) -> None:
        """Mark the step as done; `end` has checked that no lookup is left out."""

    def sums(self) -> list[tf.Tensor]:
        """Return the sums of this rank's gradients, (u, dim) for each table of each lookup that has any."""
        return self._gradients.sums()

    def by_table(self, gradients: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> list[TableGradient]:
        """Group gradients by physical table, at the rows' owners.

        Args:
          gradients: On one rank, the gradients to group, made of `sums`. On several ranks the sums have
            arrived at the rows' owners already, and may be used once ``gradients`` are computed.
        """
        return self._gradients.by_table(gradients)

    def named(self, gradients: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> list[NamedGradient]:
        """Return this rank's gradients, made of `sums`, with their keys."""
        return self._gradients.named(gradients)


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
