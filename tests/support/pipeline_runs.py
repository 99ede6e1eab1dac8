"""Trains models of every kind with a pipeline of some depth, and returns all that depth must not change."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import gmeta
from gmeta.core import collectives
from gmeta.core.keras import submodules
from gmeta.initializers import Normal
from gmeta.layers import HSTU, MLP, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.losses.softmax import uniform_negatives
from gmeta.meta import InnerLoop
from gmeta.models import GRM, MetaModel, Model, NextItemModel
from gmeta.ops.table.records import Statistics
from gmeta.policies import LFU, LRU, TTL, CountAdmission, ProbabilityAdmission, TwoPrecisions
from support.drawn_batches import draw_exposures
from support.tables import sorted_records

STEPS, UNITS = 14, 12  # steps of an epoch, and the most samples or tasks of a rank in each
_ITEMS = 200  # items in the catalogue of a next-item model
TASK = 5  # samples of a task, the last two of which are query
_START = Normal(0.0, 0.3)
_POLICIES: dict[str, Any] = {
    "ctr": {},
    "counted": {"admission": CountAdmission(2)},
    "by chance": {"admission": ProbabilityAdmission(0.5), "precision": TwoPrecisions(threshold=3)},
    "recent": {"eviction": LRU(max_rows=40)},
    "frequent": {"eviction": LFU(max_rows=40), "admission": CountAdmission(2)},
    "expiring": {"eviction": TTL(steps=3), "precision": TwoPrecisions(threshold=2)},
}
_LOOPS = {
    "maml": InnerLoop(steps=2, learning_rate=0.05),
    "rows": InnerLoop(adapt="all", learning_rate=0.05, learn_learning_rate="layer", clip_norm=2.0),
}
_NEGATIVES_PER: dict[str, Any] = {
    "next item": "step",
    "next item of users": "user",
    "next item of positions": "position",
}
KINDS = (*_POLICIES, "policies", "towers", *_LOOPS, "grm", "drawn", "next item")
"""Kinds of models; "policies" has a table of each policy, where others have one policy."""


def train_at_depth(
    kind: str,
    depth: int,
    *,
    micro_batches: int = 1,
    cluster: bool = False,
    dropout: float = 0.2,
    epochs: int = 2,
    callbacks: Sequence[tf.keras.callbacks.Callback] = (),
    fit: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train a model with the data drawn for this rank, and return its state.

    Args:
      kind: One of `KINDS`, or "next item of users" or "next item of positions", which have their own
        negatives.
      depth: The pipeline's depth.
      micro_batches: The pipeline's number of micro-batches.
      cluster: Whether micro-batches get samples that share keys.
      dropout: The rate of dropout in models that have one.
      epochs: The number of epochs.
      callbacks: More callbacks of `fit`.
      fit: More arguments of `fit`.
      **settings: More arguments of `compile`.

    Returns:
      The losses; the dense weights and optimizer state; each table's records and statistics.
    """
    random.seed(5)  # Keras draws seeds from it
    tf.random.set_seed(5)
    model, batches = make_model(kind, dropout)
    optimizer = settings.pop("optimizer", tf.keras.optimizers.Adam(0.02))
    pipeline = gmeta.Pipeline(depth, micro_batches, cluster)
    if kind == "grm" or kind in _NEGATIVES_PER:
        model.compile(optimizer, pipeline=pipeline, **settings)
    else:
        model.compile(optimizer, "mse", pipeline=pipeline, **settings)
    history = model.fit(
        own_data(batches), epochs=epochs, verbose=0, callbacks=list(callbacks), **(fit or {})
    ).history
    tables = [table for each in collections_of(model) for table in each.tables]
    return {
        "history": history,
        "dense": [weight.numpy() for weight in model.weights],
        "slots": [slot.numpy() for slot in model.optimizer.variables],
        "records": [sorted_records(table) for table in tables],
        "statistics": [[int(count) for count in table.statistics()] for table in tables],
    }


def train_to_compare_sums(
    kind: str, depth: int = 0, micro_batches: int = 1, fit: dict[str, Any] | None = None, **settings: Any
) -> dict[str, Any]:
    """Train as `train_at_depth` does, without magnifying the rounding of sums.

    There is no dropout, because each micro-batch would drop different numbers. The optimizer is SGD: Adam
    would divide gradients by their size, and turn the rounding of a small one into a full step. Its slots are
    left out: they are its last step, which may be a small difference of large numbers.
    """
    settings = {"optimizer": tf.keras.optimizers.SGD(0.05), "epochs": 1, **settings}
    found = train_at_depth(kind, depth, micro_batches=micro_batches, dropout=0.0, fit=fit, **settings)
    del found["slots"]
    return found


def take_moves(found: dict[str, Any]) -> int:
    """Remove the counts of tiers from the result of `train_at_depth`.

    Returns:
      The number of rows that have moved to the fast tier.
    """
    named = [Statistics(*counts)._asdict() for counts in found["statistics"]]
    moved = sum(counts["brought"] for counts in named)
    of_places = ("bytes", "disk_rows", "disk_bytes", "host_rows", "brought", "spilled", "crowded")
    found["statistics"] = [
        [count for name, count in counts.items() if name not in of_places] for counts in named
    ]
    return moved


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Return the parts of two states that differ in any bit."""
    if isinstance(one, dict):
        return [d for name in one for d in differences(one[name], other[name], f"{path}/{name}")]
    if isinstance(one, list):
        pairs = enumerate(zip(one, other, strict=True))
        return [d for index, pair in pairs for d in differences(*pair, f"{path}/{index}")]
    return [] if np.array_equal(one, other, equal_nan=True) else [path]


def distances(one: Any, other: Any, path: str = "") -> dict[str, float]:
    """Return the difference of two states, for each array relative to its largest number.

    A single number may cross 0 during training, so below 1 its difference isn't relative. Arrays that aren't
    floats differ by 0 or 1.
    """
    if isinstance(one, dict):
        return {k: d for n in one for k, d in distances(one[n], other[n], f"{path}/{n}").items()}
    if isinstance(one, list):
        pairs = enumerate(zip(one, other, strict=True))
        return {k: d for i, pair in pairs for k, d in distances(*pair, f"{path}/{i}").items()}
    first, second = np.asarray(one), np.asarray(other)
    if first.shape != second.shape or first.dtype.kind != "f":
        return {path: float(not np.array_equal(first, second))}
    largest = np.abs(first).max(initial=0.0 if first.ndim else 1.0)
    return {path: float(np.abs(first - second).max(initial=0.0) / (largest or 1.0))}


def make_model(kind: str, dropout: float = 0.2) -> tuple[Any, Callable[[], Iterator[Any]]]:
    """Make a model and a function that draws this rank's batches."""
    if kind == "grm":
        return _grm(), _exposures
    if kind in _NEGATIVES_PER:
        return _next_item(kind, dropout), _histories
    if kind in _LOOPS:
        network = MLP({"fc": 8, "out": 1}, seed=3)
        return MetaModel(_collection("ctr"), network, inner=_LOOPS[kind]), _tasks
    if kind == "drawn":
        return Drawn(), _samples
    x = {
        "user": tf.keras.Input([], name="user", dtype=tf.int64),
        "tags": tf.keras.Input([None], name="tags", dtype=tf.int64, ragged=True),
        "wide": tf.keras.Input([], name="wide", dtype=tf.int64),
    }
    if kind == "policies":
        inputs = (x["user"], x["tags"], x["wide"], x["tags"], x["user"])
        x_of = dict(zip(_one_table_each(), inputs, strict=True))
        vectors = list(_policy_collection()(x_of).values())
    else:
        vectors = list(_collection(kind)(x).values())
    if kind == "towers":  # a second lookup in the same tables, and one in others
        shared = _collection("recent", name="other")
        vectors += [*shared(x).values(), *shared({**x, "user": x["wide"]}).values()]
    hidden = tf.keras.layers.Dense(8, "tanh")(tf.keras.layers.Concatenate()(vectors))
    hidden = tf.keras.layers.Dropout(dropout)(hidden)
    return Model(x, tf.keras.layers.Dense(1)(hidden)), _samples


class Drawn(Model):
    """A model whose lookup depends on the number of its step."""

    def __init__(self) -> None:
        super().__init__()
        table = TableConfig("user", 4, initializer=_START, **_POLICIES["recent"])
        self.collection = EmbeddingCollection([FeatureConfig("user", table)])
        self.head = tf.keras.layers.Dense(1)

    def call(self, x: Any, training: bool | None = None) -> tf.Tensor:
        """Compare each user with some users drawn in each step."""
        drawn = uniform_negatives(6, 50, seed=1, step=self.step_number)
        ids = tf.concat([drawn, x["user"]], axis=0)
        vectors = self.collection({"user": ids}, training=training)["user"]
        return 3.0 * self.head(vectors[6:] * tf.reduce_mean(vectors[:6], axis=0))


def collections_of(model: Any) -> list[EmbeddingCollection]:
    """Return the collections of a model, in a fixed order."""
    found = [part for part in submodules(model) if isinstance(part, EmbeddingCollection)]
    return sorted(found, key=lambda collection: collection.name)


def own_data(batches: Callable[[], Iterator[Any]]) -> tf.data.Dataset:
    """Return this rank's batches as a data set that isn't sharded."""

    def spec(part: Any) -> Any:
        if isinstance(part, tf.RaggedTensor):
            return tf.RaggedTensorSpec([None, None], part.dtype)
        return tf.TensorSpec([None, *(None for _ in part.shape[1:])], part.dtype)

    signature = tf.nest.map_structure(spec, next(batches()))
    data = tf.data.Dataset.from_generator(batches, output_signature=signature)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return data.with_options(options)


def _collection(kind: str, name: str = "collection") -> EmbeddingCollection:
    policy = _POLICIES.get(kind, {})
    features = [
        FeatureConfig("user", TableConfig("user", 4, initializer=_START, **policy)),
        FeatureConfig("tags", TableConfig("tags", 4, initializer=_START, **policy), combiner="mean"),
        FeatureConfig("wide", TableConfig("wide", 6, initializer=_START), hash=True),
    ]
    return EmbeddingCollection(features, name=name)


def _one_table_each() -> list[str]:
    """The policies' names, as features may have them."""
    return [name.replace(" ", "_") for name, policy in _POLICIES.items() if policy]


def _policy_collection() -> EmbeddingCollection:
    features = [
        FeatureConfig(
            name,
            TableConfig(name, 4, initializer=_START, **_POLICIES[name.replace("_", " ")]),
            combiner="mean" if name in ("by_chance", "frequent") else None,
        )
        for name in _one_table_each()
    ]
    return EmbeddingCollection(features, name="collection")


def _sizes() -> Iterator[tuple[np.random.Generator, int]]:
    """A generator and a number of units for each step; the data of ranks end at different steps."""
    rank = collectives.world().rank
    for step in range(STEPS - 3 * rank):
        draw = np.random.default_rng([rank, step])
        yield draw, UNITS if step % 3 == 0 else int(draw.integers(0 if rank else 1, UNITS + 1))


def _columns(draw: np.random.Generator, samples: int) -> dict[str, Any]:
    tags = draw.integers(0, 4, samples)
    return {
        "user": tf.constant(np.minimum(draw.zipf(1.2, samples), 10**6)),
        "tags": tf.RaggedTensor.from_row_lengths(np.minimum(draw.zipf(1.3, tags.sum()), 300), tags),
        "wide": tf.constant(np.minimum(draw.zipf(1.5, samples), 200)),
    }


def _samples() -> Iterator[Any]:
    for draw, samples in _sizes():
        yield _columns(draw, samples), tf.constant(draw.normal(size=[samples, 1]).astype(np.float32))


def _tasks() -> Iterator[Any]:
    for draw, tasks in _sizes():
        index = np.arange(tasks * TASK).reshape(tasks, TASK)
        mask = np.ones([tasks, TASK], np.float32)
        yield {
            "features": _columns(draw, tasks * TASK),
            "label": tf.constant(draw.normal(size=tasks * TASK).astype(np.float32)),
            "task": tf.range(tasks, dtype=tf.int64),
            "support": {"index": tf.constant(index[:, :-2]), "mask": tf.constant(mask[:, :-2])},
            "query": {"index": tf.constant(index[:, -2:]), "mask": tf.constant(mask[:, -2:])},
        }


def _exposures() -> Iterator[Any]:
    for draw, users in _sizes():
        seed = int(draw.integers(1 << 30))
        events, shown = draw.integers(0, 6, [2, users]).tolist()
        yield draw_exposures(seed, events, shown)


def _histories() -> Iterator[Any]:
    for draw, users in _sizes():
        lengths = draw.integers(0, 9, users)  # some are longer than the model reads
        item, time = draw.integers(0, _ITEMS, lengths.sum()), draw.integers(0, 10**6, lengths.sum())
        columns = {"item": np.minimum(item, draw.integers(0, _ITEMS, len(item))), "time": time}
        yield {name: tf.RaggedTensor.from_row_lengths(column, lengths) for name, column in columns.items()}


def _next_item(kind: str, dropout: float) -> Any:
    table = TableConfig("item", 4, initializer=_START, **_POLICIES["recent"])
    backbone = HSTU(blocks=1, heads=1, attention_dim=4, value_dim=4, max_length=6)
    return NextItemModel(
        EmbeddingCollection([FeatureConfig("item", table)]),
        backbone,
        items=_ITEMS,
        max_length=6,
        time="time",
        negatives=5,
        negatives_per=_NEGATIVES_PER[kind],
        dropout=dropout,
    )


def _grm() -> Any:
    features = [
        FeatureConfig(name, TableConfig(name, 4, initializer=_START)) for name in ("item", "action", "city")
    ]
    return GRM.of(
        features,
        contexts=["city"],
        history=["item", "action"],
        targets=["item"],
        time="time",
        dim=4,
        blocks=1,
        heads=1,
        max_length=6,
        expert_units=[4],
        tower_units=[4],
        report=None,
    )
