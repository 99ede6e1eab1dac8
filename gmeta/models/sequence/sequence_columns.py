"""The columns that a sequence model reads from a batch, for one lookup, and the layout of its sequences.

A batch is a nested dict with one row per user, as `gmeta.io.sequences` yields it::

    {"task": (users,),
     "contexts": {name: (users,)},                  # or ragged (users, None), for a feature with a combiner
     "history": {name: ragged (users, None)},       # events, in order of time
     "targets": {name: ragged (users, None)},       # exposures
     "labels": {name: ragged (users, None)}}
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.core.graph import assert_first, refuse_numbers, refuse_unless
from gmeta.layers import EmbeddingCollection
from gmeta.ops import Jagged, jagged

Batch = Mapping[str, Any]
Part = Literal["history", "targets"]


class Layout(NamedTuple):
    """The offsets of the parts of a batch's sequences, and the times and scenarios of their tokens.

    Attributes:
      history: (users + 1,) int64 offsets of the events.
      targets: (users + 1,) int64 offsets of the exposures.
      history_times: (events,) int64; None if the model reads no times.
      target_times: (exposures,) int64.
      scenarios: (exposures,) integers; None if there is one scenario.
    """

    history: tf.Tensor
    targets: tf.Tensor
    history_times: tf.Tensor | None = None
    target_times: tf.Tensor | None = None
    scenarios: tf.Tensor | None = None

    @property
    def exposures(self) -> tf.Tensor:
        """The number of exposures, () int64."""
        with tf.device("CPU:0"):
            return self.targets[-1]

    def of_exposures(self, of_users: tf.Tensor) -> tf.Tensor:
        """Repeat each user's values for its exposures: (users, ...) -> (exposures, ...)."""
        with tf.device("CPU:0"):
            return tf.repeat(of_users, self.targets[1:] - self.targets[:-1], axis=0)


@dataclass(frozen=True)
class SequenceColumns:
    """The columns of each part of a sequence.

    Attributes:
      contexts: Features of the user, one token each. May be empty.
      history: Features of an event.
      targets: Features of an exposure. A feature with the same name in the history is the same feature.
      time: The column of times, in the history and in the targets; None: no times are read.
      scenario: A column of the targets or the contexts that identifies the scenario; None: there is only one.

    Raises:
      ConfigError: The history or the targets have no features.
    """

    contexts: tuple[str, ...]
    history: tuple[str, ...]
    targets: tuple[str, ...]
    time: str | None = None
    scenario: str | None = None

    def __post_init__(self) -> None:
        for part in ("contexts", "history", "targets"):
            given = getattr(self, part)
            if isinstance(given, str):
                raise ConfigError(f"{part} must be a list of columns, got the text {given!r}")
            object.__setattr__(self, part, tuple(given))
        if not self.history or not self.targets:
            raise ConfigError(
                f"history and targets must each name a feature, got {self.history} and {self.targets}"
            )

    def check(self, collection: EmbeddingCollection) -> None:
        """Check that the collection has these features, in a form that tokens can be made from.

        Raises:
          ConfigError: It doesn't, or it has other features too.
        """
        known = {feature.name: feature for feature in collection.features}
        for part in ("contexts", "history", "targets"):
            for name in getattr(self, part):
                if name not in known:
                    raise ConfigError(
                        f"{part} name {name!r}, and the collection's features are {list(known)}"
                    )
                if known[name].combiner is not None and (part != "contexts" or name in self._of_tokens):
                    raise ConfigError(
                        f"feature {name!r} has a combiner, and one of {part} has one id per token. Lists of "
                        "ids can be contexts alone, under names of their own (with table= they share rows)"
                    )
        unread = [name for name in known if name not in (*self.contexts, *self._of_tokens)]
        if unread:
            raise ConfigError(
                f"the collection's features {', '.join(unread)} are in no part: name them in contexts, "
                "history or targets, or leave them out"
            )

    @property
    def _of_tokens(self) -> tuple[str, ...]:
        return (*self.history, *self.targets)

    def layout(self, batch: Batch, only: Part | None = None) -> Layout:
        """Compute where the parts of the sequences lie.

        Args:
          batch: The batch.
          only: The part to read; the other one is empty then, and needn't be in the batch. None: both.

        Raises:
          ConfigError: A column is missing, or not ragged.
          InvalidArgumentError: Columns of a part have different lengths.
        """
        read: tuple[Part, ...] = ("history", "targets") if only is None else (only,)
        times: dict[Part, tf.Tensor] = {}
        if self.time is not None:
            nothing = tf.zeros([0], tf.int64)
            times = {"history": nothing, "targets": nothing}
            times |= {part: self._times(batch, part, self.time) for part in read}
        offsets = {part: self._column(batch, part, getattr(self, part)[0]).offsets for part in read}
        with tf.device("CPU:0"):
            none = tf.zeros_like(offsets[read[0]])
        history, targets = offsets.get("history", none), offsets.get("targets", none)
        layout = Layout(history, targets, times.get("history"), times.get("targets"))
        if self.scenario is None or only == "history":
            return layout
        if self.scenario in batch["targets"]:
            return layout._replace(scenarios=self._column(batch, "targets", self.scenario).values)
        return layout._replace(scenarios=layout.of_exposures(_column_of(batch, "contexts", self.scenario)))

    def ids(self, batch: Batch, labels: Collection[str] = (), *, targets: bool = True) -> dict[str, Any]:
        """Return feature -> the ids of all parts one after another, for one lookup.

        Args:
          batch: The batch.
          labels: Columns of the history that are also labels of exposures. `gmeta.io` reads labels as floats;
            in the history they are ids that say what the user did.
          targets: Whether to read the targets.

        Raises:
          ConfigError: A column is missing, or not ragged.
          InvalidArgumentError: Columns of a part have different lengths.
        """
        found: dict[str, list[Any]] = {}
        for name in self.contexts:
            ids = _column_of(batch, "contexts", name)
            found.setdefault(name, []).append(_as_ragged(ids))
        both: tuple[Part, ...] = ("history", "targets") if targets else ("history",)
        for part in both:
            for name, column in self.part_ids(batch, part, labels).items():
                found.setdefault(name, []).append(column.values)
        return {name: parts[0] if len(parts) == 1 else _join(name, parts) for name, parts in found.items()}

    def part_ids(self, batch: Batch, part: Part, labels: Collection[str] = ()) -> dict[str, Jagged]:
        """Return feature -> the ids of one part of the sequences; see `ids`."""
        found = {}
        for name in getattr(self, part):
            column = self._column(batch, part, name)
            found[name] = column._replace(values=_whole(column.values, name)) if name in labels else column
        return found

    def parts(self, vectors: Mapping[str, tf.Tensor], layout: Layout) -> dict[str, list[tf.Tensor]]:
        """Split the vectors of `ids` by part: contexts [(users, dim)], history [(events, dim)], targets.

        Args:
          vectors: Feature -> (ids, dim).
          layout: The layout of the batch.
        """
        with tf.device("CPU:0"):  # where `tf.split` reads them
            sizes = {
                "contexts": tf.size(layout.history, tf.int64) - 1,
                "history": layout.history[-1],
                "targets": layout.targets[-1],
            }
        found: dict[str, dict[str, tf.Tensor]] = {part: {} for part in sizes}
        for name, vector in vectors.items():
            among = [part for part in sizes if name in getattr(self, part)]
            cut = [vector]
            if len(among) > 1:
                with tf.device("CPU:0"):
                    counts = tf.stack([sizes[part] for part in among])
                cut = tf.split(vector, counts, num=len(among))
            for part, own in zip(among, cut, strict=True):
                found[part][name] = own
        return {part: [own[name] for name in getattr(self, part)] for part, own in found.items()}

    def users(self, batch: Batch, layout: Layout) -> tf.Tensor:
        """Return the user of each exposure, (exposures,).

        Raises:
          ConfigError: The batch has no ``task``.
        """
        if "task" not in batch:
            raise ConfigError(f"the batch lacks 'task', a number for each user; it has {', '.join(batch)}")
        return layout.of_exposures(batch["task"])

    def labels(self, batch: Batch, columns: Mapping[str, str]) -> dict[str, tf.Tensor]:
        """Return name -> label of each exposure, (exposures,) float32, read from the columns by name.

        Raises:
          ConfigError: A column is missing or has other lengths; or a label is below 0 or above 1 (in a graph,
            raised as by `gmeta.core.graph.refuse_unless`).
        """
        splits = self._column(batch, "targets", self.targets[0]).offsets
        found = {}
        for name, column in columns.items():
            of_column = _jagged(batch, "labels", column)
            with tf.device("CPU:0"):  # a GPU would wait for the answer
                label = tf.cast(_alike(of_column, splits, "labels", column).values, tf.float32)
                good = ~((label < 0) | (label > 1))  # NaN makes the loss NaN, which all ranks notice together
                found[name] = refuse_numbers(label, good, f"labels {column!r} must lie between 0 and 1")
        return found

    def _times(self, batch: Batch, part: str, name: str) -> tf.Tensor:
        times = self._column(batch, part, name).values
        if not times.dtype.is_integer:
            raise ConfigError(
                f"{part} {name!r} must be times as integers, such as seconds, got {times.dtype.name}"
            )
        return tf.cast(times, tf.int64)

    def _column(self, batch: Batch, part: str, name: str) -> Jagged:
        """Return a column whose rows are as long as those of the part's first column."""
        first = getattr(self, part)[0]
        column = _jagged(batch, part, name)
        return column if name == first else _alike(column, _jagged(batch, part, first).offsets, part, name)

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments that recreate this object."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _column_of(batch: Batch, part: str, name: str) -> Any:
    if part not in batch or name not in batch[part]:
        has = f"{part} {', '.join(batch[part]) or 'empty'}" if part in batch else f"no {part}"
        raise ConfigError(f"the batch lacks {name!r} among its {part}; it has {has}")
    return batch[part][name]


def _whole(labels: tf.Tensor, name: str) -> tf.Tensor:
    """Convert labels to ids.

    Raises:
      ConfigError: A label isn't a whole number (in a graph, raised as by
        `gmeta.core.graph.refuse_unless`).
    """
    if not labels.dtype.is_floating:
        return labels
    told = f"history {name!r} has labels that are not whole numbers, so they can't be ids: leave it out"
    with tf.device("CPU:0"):
        ids = tf.cast(labels, tf.int64)
        return refuse_unless(ids, tf.cast(ids, labels.dtype) == labels, told)


def _join(name: str, parts: list[Any]) -> tf.Tensor:
    """Concatenate the ids of a feature that is in several parts."""
    kinds = {part.dtype for part in parts}
    if kinds != {tf.string} and not all(kind.is_integer for kind in kinds):
        raise ConfigError(
            f"feature {name!r} must be integer ids, or texts, alike in all parts, got "
            f"{', '.join(sorted(kind.name for kind in kinds))}"
        )
    with tf.device("CPU:0"):  # where a batch's ids are
        kept = kinds == {tf.string}
        return tf.concat([part if kept else tf.cast(part, tf.int64) for part in parts], axis=0)


def _as_ragged(ids: Any) -> Any:
    """Convert a context's ids to the form that the embeddings take."""
    sequences = jagged.as_jagged(ids) if isinstance(ids, Jagged) else None
    return ids if sequences is None else jagged.to_ragged(sequences)


def _jagged(batch: Batch, part: str, name: str) -> Jagged:
    column = _column_of(batch, part, name)
    sequences = jagged.as_jagged(column)
    if sequences is None:
        raise ConfigError(
            f"{part} {name!r} must be ragged, one row per user, or a gmeta.ops.Jagged, got "
            f"{type(column).__name__}: gmeta.io.sequences reads it so, and tf.ragged.boolean_mask(x, x != -1)"
            " makes it of a matrix padded with -1"
        )
    return sequences


def _alike(column: Jagged, offsets: tf.Tensor, part: str, name: str) -> Jagged:
    told = [f"{part}: rows of {name!r} have other lengths than those of the first column"]
    with tf.device("CPU:0"):  # where a batch's offsets are: a GPU would wait for each answer
        same = tf.size(column.offsets) == tf.size(offsets)
        size = tf.minimum(tf.size(column.offsets), tf.size(offsets))
        same = same & tf.reduce_all(column.offsets[:size] == offsets[:size])
        return Jagged(assert_first(column.values, same, told), offsets)
