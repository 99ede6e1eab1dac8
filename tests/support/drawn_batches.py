"""Hypothesis strategies for schemas and rows, with names and values that are hard for encoders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from hypothesis import strategies as st

from gmeta.core.schema import Column, Schema
from gmeta.experiment.baselines.task_rows import Rows, Tasks
from gmeta.ops import AttentionMask
from gmeta.testing import sees
from support.reference.sequence_layers import row_times

INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False)


def _encodes(text: str) -> bool:
    try:
        return "\0" not in text and bool(text.encode())
    except UnicodeEncodeError:
        return False


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    """Schemas of a key and up to four other columns of any kind, in any order."""
    names = draw(st.lists(st.text(min_size=1, max_size=200).filter(_encodes), max_size=4, unique=True))
    columns = [Column("task"), Column("batch_id")]
    for name in names:
        if name not in ("task", "batch_id"):
            columns.append(Column(name, draw(st.sampled_from(["int64", "float32"])), draw(st.booleans())))
    return Schema(tuple(draw(st.permutations(columns))))


@st.composite
def rows_of(draw: st.DrawFn, schema: Schema, count: int, ints: Any = INT64) -> list[list[list[Any]]]:
    """``count`` rows of a schema, each with a list of values per column; ``ints`` draws the int64 ones."""
    rows = []
    for _ in range(count):
        row = []
        for column in schema:
            values = ints if column.dtype == "int64" else FLOAT32
            row.append(draw(st.lists(values, max_size=5)) if column.is_list else [draw(values)])
        rows.append(row)
    return rows


def as_columns(schema: Schema, rows: Sequence[Sequence[Sequence[Any]]]) -> dict[str, Any]:
    """Rows in the form of `RecordWriter`'s columns."""
    out: dict[str, Any] = {}
    for i, column in enumerate(schema):
        values = np.array([value for row in rows for value in row[i]], column.dtype)
        splits = np.cumsum([0] + [len(row[i]) for row in rows])
        out[column.name] = (values, splits) if column.is_list else values
    return out


# Small handmade batches of tasks.


def make_batch(sizes: Sequence[int], query: int = 2, seed: int = 0, pad: int = 0) -> dict[str, Any]:
    """Tasks of the given support sizes, with ids that overlap between support and query."""
    rng = np.random.default_rng(seed)
    total = sum(sizes) + query * len(sizes)
    width = max(sizes) + pad
    starts = np.cumsum([0, *(size + query for size in sizes)])[:-1]
    steps = np.arange(width)
    mask = steps < np.array(sizes)[:, None]
    return {
        "features": {
            "user": tf.constant(np.repeat(np.arange(len(sizes)), np.array(sizes) + query), tf.int64),
            "item": tf.constant(rng.integers(0, 6, total), tf.int64),
        },
        "label": tf.constant(rng.normal(size=total), tf.float32),
        "task": tf.range(len(sizes), dtype=tf.int64),
        "support": {
            "index": tf.constant(np.where(mask, starts[:, None] + steps, 0), tf.int64),
            "mask": tf.constant(mask, tf.float32),
        },
        "query": {
            "index": tf.constant(starts[:, None] + np.array(sizes)[:, None] + np.arange(query), tf.int64),
            "mask": tf.ones([len(sizes), query]),
        },
    }


def drawn_alone(batch: Mapping[str, Any], task: int) -> dict[str, Any]:
    """One task of a batch as a batch of its own."""
    real = batch["support"]["mask"][task] > 0
    index = tf.concat([batch["support"]["index"][task][real], batch["query"]["index"][task]], axis=0)
    size, query = int(tf.reduce_sum(tf.cast(real, tf.int32))), batch["query"]["index"].shape[1]
    return {
        "features": {name: tf.gather(ids, index) for name, ids in batch["features"].items()},
        "label": tf.gather(batch["label"], index),
        "task": batch["task"][task : task + 1],
        "support": {"index": tf.range(size, dtype=tf.int64)[None], "mask": tf.ones([1, size])},
        "query": {
            "index": tf.range(size, size + query, dtype=tf.int64)[None],
            "mask": tf.ones([1, query]),
        },
    }


# Random batches of users with contexts, history and exposures, in the form of `gmeta.io.sequences`.

IDS = {"item": 40, "category": 5, "action": 3, "city": 4, "age": 6, "scene": 2}


def draw_exposures(seed: int, events: list[int], exposures: list[int], tags: bool = False) -> dict[str, Any]:
    """Draw a batch.

    Args:
      seed: The seed of all draws.
      events: The number of events of each user.
      exposures: The number of exposures of each user; clicks depend on the item, purchases on clicks.
      tags: Whether contexts have lists of tags.
    """
    random = np.random.default_rng(seed)

    def column(counts: list[int], name: str) -> tf.RaggedTensor:
        return _ragged(random.integers(0, IDS[name], sum(counts)), counts)

    history = {name: column(events, name) for name in ("item", "category", "action")}
    targets = {name: column(exposures, name) for name in ("item", "category", "scene")}
    clicks = (targets["item"].values.numpy() % 3 == 0).astype(np.float32)
    bought = clicks * (random.random(len(clicks)) < 0.5)
    times = [np.sort(random.integers(0, 10**6, count)) for count in events]
    shown = [np.sort(random.integers(5 * 10**5, 2 * 10**6, count)) for count in exposures]
    empty = [np.zeros(0, np.int64)]
    contexts: dict[str, Any] = {
        name: tf.constant(random.integers(0, IDS[name], len(events))) for name in ("city", "age")
    }
    if tags:
        several = random.integers(0, 4, len(events)).tolist()
        contexts["tags"] = _ragged(random.integers(0, 9, sum(several)), several)
    return {
        "task": tf.range(100, 100 + len(events), dtype=tf.int64),
        "contexts": contexts,
        "history": {**history, "time": _ragged(np.concatenate([*empty, *times]), events)},
        "targets": {**targets, "time": _ragged(np.concatenate([*empty, *shown]), exposures)},
        "labels": {"click": _ragged(clicks, exposures), "buy": _ragged(bought, exposures)},
    }


def of_user(batch: dict[str, Any], user: int) -> dict[str, Any]:
    """One of the users, alone."""
    return {
        part: {name: values[user : user + 1] for name, values in columns.items()}
        if isinstance(columns, dict)
        else columns[user : user + 1]
        for part, columns in batch.items()
    }


def with_targets(batch: dict[str, Any], change: Any) -> dict[str, Any]:
    """The batch with other columns of targets and labels: ``change`` makes each from the old."""
    return {
        **batch,
        **{
            part: {name: change(column) for name, column in batch[part].items()}
            for part in ("targets", "labels")
        },
    }


def _ragged(values: Any, counts: list[int]) -> tf.RaggedTensor:
    return tf.RaggedTensor.from_row_lengths(values, np.array(counts, np.int64))


# Random task batches in the form of `gmeta.io.tasks`.

Batch = dict[str, Any]


def task_batch(
    sizes: Sequence[int],
    query: int = 3,
    *,
    ids: Mapping[str, int] | None = None,
    floats: Sequence[str] = (),
    seed: int = 0,
    pad: int = 0,
) -> Batch:
    """Draw tasks of the given support sizes, with random features and labels.

    Args:
      sizes: The number of support samples of each task.
      query: The number of query samples of each task.
      ids: Feature -> the bound of its ids; small, so that support and query share some.
      floats: Additional float32 columns.
      seed: The seed of the draws.
      pad: Columns of padding after the longest support set.
    """
    rng = np.random.default_rng(seed)
    whole = np.asarray(sizes) + query
    starts, total = np.cumsum([0, *whole])[:-1], int(whole.sum())
    steps = np.arange(max(sizes) + pad)
    real = steps < np.asarray(sizes)[:, None]
    features = {name: tf.constant(rng.integers(0, n, total)) for name, n in (ids or _IDS).items()}
    features |= {name: tf.constant(rng.normal(size=total), tf.float32) for name in floats}
    return {
        "features": features,
        "label": tf.constant(rng.normal(size=total), tf.float32),
        "task": tf.range(len(sizes), dtype=tf.int64),
        "support": {
            "index": tf.constant(np.where(real, starts[:, None] + steps, 0)),
            "mask": tf.constant(real, tf.float32),
        },
        "query": {
            "index": tf.constant(starts[:, None] + np.asarray(sizes)[:, None] + np.arange(query)),
            "mask": tf.ones([len(sizes), query]),
        },
    }


def alone(batch: Batch, task: int) -> Batch:
    """One task of a batch as a batch of its own, without padding."""
    parts = {
        part: tf.boolean_mask(batch[part]["index"][task], batch[part]["mask"][task] > 0)
        for part in ("support", "query")
    }
    sizes = {part: int(tf.size(index)) for part, index in parts.items()}
    rows = tf.concat(list(parts.values()), axis=0)
    first = {"support": 0, "query": sizes["support"]}
    return {
        "features": {name: tf.gather(values, rows) for name, values in batch["features"].items()},
        "label": tf.gather(batch["label"], rows),
        "task": batch["task"][task : task + 1],
        **{
            part: {
                "index": tf.range(first[part], first[part] + size, dtype=tf.int64)[tf.newaxis],
                "mask": tf.ones([1, size]),
            }
            for part, size in sizes.items()
        },
    }


def opposed_tasks(
    batches: int, tasks: int = 16, *, support: int = 6, query: int = 4, seed: int = 0
) -> list[Batch]:
    """Tasks half of which like exactly the items that the others dislike; only the support shows which.

    A model that doesn't adapt can't do better than to predict 0, with a mean squared error of 1.
    """
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(batches):
        batch = task_batch(
            [support] * tasks, query, ids={"user": 1, "item": 8}, seed=int(rng.integers(1 << 30))
        )
        liked = np.where(batch["features"]["item"].numpy() % 2, 1.0, -1.0)
        signs = np.repeat(rng.choice([-1.0, 1.0], tasks), support + query)
        made.append({**batch, "label": tf.constant(liked * signs, tf.float32)})
    return made


def dataset(batches: Sequence[Batch], *, known: bool = True) -> tf.data.Dataset:
    """Batches of different numbers of tasks and samples as a data set, of known size or not."""

    def spec(part: tf.Tensor) -> tf.TensorSpec:
        return tf.TensorSpec([None] * part.shape.rank, part.dtype)

    signature = tf.nest.map_structure(spec, batches[0])
    made = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
    return made.apply(tf.data.experimental.assert_cardinality(len(batches))) if known else made


_IDS = {"user": 5, "item": 6}


# Task batches as plain values, for tests that compare them.


def plain(element: Any) -> Any:
    """An element as nested lists."""
    if isinstance(element, Mapping):
        return {name: plain(value) for name, value in element.items()}
    return element.to_list() if isinstance(element, tf.RaggedTensor) else element.numpy().tolist()


def rows_by_task(batch: Mapping[str, Any], part: str, column: str = "timestamp") -> dict[int, list[Any]]:
    """Task -> the values of feature ``column`` in the real rows of its ``"support"`` or ``"query"`` set."""
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


# Random batches of sequences ``[contexts | history | targets]``, for tests of attention layers.

Array = npt.NDArray[Any]


class DrawnSequences(NamedTuple):
    """A batch, with the data that reference forms need."""

    x: Array
    offsets: Array
    contexts: Array
    targets: Array
    times: Array
    row_times: Array
    masks: list[Array]

    def only(self, sequence: int) -> DrawnSequences:
        """One of the sequences, alone."""
        begin, end = self.offsets[sequence : sequence + 2]
        one = slice(sequence, sequence + 1)
        return DrawnSequences(
            self.x[begin:end],
            np.array([0, end - begin]),
            self.contexts[one],
            self.targets[one],
            self.times[begin:end],
            self.row_times[begin:end],
            self.masks[one],
        )

    @property
    def arguments(self) -> dict[str, Array]:
        """The arguments of a layer's call besides the sequences."""
        return {"contexts": self.contexts, "targets": self.targets, "times": self.times}


def draw_sequences(
    seed: int, sizes: Sequence[tuple[int, int, int]], dim: int, mask: AttentionMask
) -> DrawnSequences:
    """Draw random tokens and times.

    Args:
      seed: The seed of both.
      sizes: For each sequence the numbers of contextual tokens, tokens of the history, and targets.
      dim: The width of a token.
      mask: The rule by which tokens see each other.
    """
    random = np.random.default_rng(seed)
    contexts, history, targets = np.array(sizes, np.int64).reshape(-1, 3).T
    lengths = contexts + history + targets
    times = [np.sort(random.integers(0, 10 ** random.integers(1, 9), length)) for length in lengths]
    rows = [row_times(t.tolist(), c, g) for t, c, g in zip(times, contexts, targets, strict=True)]
    masks = [
        sees(mask, int(n), int(c), int(g), t.tolist())
        for n, c, g, t in zip(lengths, contexts, targets, times, strict=True)
    ]
    none = [np.zeros(0, np.int64)]
    return DrawnSequences(
        random.normal(size=(int(lengths.sum()), dim)),
        np.cumsum([0, *lengths]),
        contexts,
        targets,
        np.concatenate([*none, *times]),
        np.concatenate([*none, *(np.array(r, np.int64) for r in rows)]),
        masks,
    )


# Random tasks in the form that baselines take.


def tasks_of(seed: int, support: list[int], query: list[int], items: int) -> Tasks:
    """Draw tasks of these support and query sizes, with labels in half steps from 1 to 5."""
    rng = np.random.default_rng(seed)

    def rows(sizes: list[int]) -> Rows:
        splits = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        labels = rng.integers(2, 11, splits[-1]) / 2
        return Rows(rng.integers(0, items, splits[-1]), labels, splits)

    return Tasks(rows(support), rows(query))


@st.composite
def task_rows(draw: st.DrawFn) -> tuple[Tasks, int]:
    """Draw tasks and the number of items; a task may lack support rows."""
    items = draw(st.integers(1, 6))
    sizes = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), min_size=2, max_size=6))
    support, query = ([size[side] for size in sizes] for side in (0, 1))
    return tasks_of(draw(st.integers(0, 2**16)), support, query, items), items
