"""Training on N ranks gives the tables, slots and dense weights of one rank on the same global batches."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core import collectives
from gmeta.core.shares import owned_shards
from gmeta.initializers import Normal
from gmeta.layers import MLP, EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.meta import InnerLoop
from gmeta.models import MetaModel, Model
from gmeta.optimizers import Adagrad, Adam
from support.process_ranks import run_ranks
from support.reference.table import logical_shards
from support.tables import sorted_records

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.shown_by("distributed/test_keras_on_ranks.py::test_trains_what_one_rank_trains"),
]

STEPS, ENDS_EARLY = 50, 40
UNITS = 12  # samples or tasks of a global batch
TASK = 5  # samples of a task, the last two of which are query
OPTIMIZERS = {
    "adam": (lambda: Adam(None), lambda: tf.keras.optimizers.Adam(0.01)),
    "adagrad": (lambda: Adagrad(None), lambda: tf.keras.optimizers.Adagrad(0.05)),
}
START = Normal(0.0, 0.3)
FEATURES = (
    FeatureConfig("user", TableConfig("user", 4, initializer=START)),
    FeatureConfig("tags", TableConfig("tags", 4, initializer=START), combiner="mean"),
    FeatureConfig("wide", TableConfig("wide", 6, initializer=START)),
)


def edges(step: int, size: int) -> np.ndarray:
    """Where the ranks' parts of a step's units begin and end: even, uneven, one idle, all at the last."""
    kind = step % 4
    if step >= ENDS_EARLY and size > 1:  # the last rank's data has ended
        inner = np.linspace(0, UNITS, size).astype(int)[1:]
    elif kind == 0:
        inner = np.linspace(0, UNITS, size + 1).astype(int)[1:-1]
    elif kind == 1:
        inner = np.sort(np.random.default_rng(step).integers(0, UNITS + 1, size - 1))
    elif kind == 2:
        widths = np.ones(size)
        widths[step // 4 % size] = 0 if size > 1 else 1
        inner = (np.cumsum(widths)[:-1] * UNITS / max(widths.sum(), 1)).astype(int)
    else:
        inner = np.zeros(size - 1, int)
    return np.concatenate([[0], inner, [UNITS]])


def raw_ids(rng: np.random.Generator, n: int, prefix: int, one_owner: bool) -> np.ndarray:
    """Skewed ids. With one owner, all keys are in the first quarter of the logical shards: rank 0's."""
    found = np.minimum(rng.zipf(1.3, n) - 1, 60)
    if not one_owner:
        return found
    pool = np.arange(2000)
    return pool[logical_shards(pool | prefix) < 256][found]


def columns(step: int, n: int, collection: EmbeddingCollection) -> dict[str, Any]:
    """n samples of a step."""
    rng = np.random.default_rng([7, step])
    prefixes = {f.name: m.key_prefix(f) for m in collection.merged for f in m.features}
    one_owner = step % 10 == 9
    lengths = rng.integers(0, 4, n)
    ids = {
        name: raw_ids(rng, lengths.sum() if name == "tags" else n, prefix, one_owner)
        for name, prefix in prefixes.items()
    }
    ends = np.concatenate([[0], np.cumsum(lengths)])
    return {
        **ids,
        "tags": [ids["tags"][a:b] for a, b in itertools.pairwise(ends)],
        "label": (rng.random(n) < 0.4).astype(np.float32),
        "target": rng.normal(size=n).astype(np.float32),
    }


def features_of(made: dict[str, Any], rows: slice) -> dict[str, Any]:
    return {
        "user": tf.constant(made["user"][rows], tf.int64),
        "tags": tf.ragged.constant([list(t) for t in made["tags"][rows]], tf.int64, ragged_rank=1),
        "wide": tf.constant(made["wide"][rows], tf.int64),
    }


def ctr_batches(collection: EmbeddingCollection) -> Iterator[Any]:
    """This rank's batches of samples."""
    here = collectives.world()
    for step in range(STEPS):
        at = edges(step, here.size)
        rows = slice(at[here.rank], at[here.rank + 1])
        if step >= ENDS_EARLY and rows.stop == rows.start:
            return
        made = columns(step, UNITS, collection)
        yield features_of(made, rows), tf.constant(made["label"][rows, None])


def task_batches(collection: EmbeddingCollection) -> Iterator[Any]:
    """This rank's batches of tasks."""
    here = collectives.world()
    for step in range(STEPS):
        at = edges(step, here.size)
        tasks = int(at[here.rank + 1] - at[here.rank])
        if step >= ENDS_EARLY and not tasks:
            return
        made = columns(step, UNITS * TASK, collection)
        rows = slice(at[here.rank] * TASK, at[here.rank + 1] * TASK)
        index = np.arange(tasks * TASK).reshape(tasks, TASK)
        mask = np.ones([tasks, TASK], np.float32)
        mask[np.arange(at[here.rank], at[here.rank + 1]) % 2 == 1, 0] = 0  # a shorter support set
        yield {
            "features": features_of(made, rows),
            "label": tf.constant(made["target"][rows]),
            "task": tf.range(tasks, dtype=tf.int64),
            "support": {"index": tf.constant(index[:, :-2]), "mask": tf.constant(mask[:, :-2])},
            "query": {"index": tf.constant(index[:, -2:]), "mask": tf.constant(mask[:, -2:])},
        }


def signature(tasks: bool) -> Any:
    ids = tf.TensorSpec([None], tf.int64)
    x = {"user": ids, "tags": tf.RaggedTensorSpec([None, None], tf.int64), "wide": ids}
    if not tasks:
        return x, tf.TensorSpec([None, 1])
    part = {"index": tf.TensorSpec([None, None], tf.int64), "mask": tf.TensorSpec([None, None])}
    return {"features": x, "label": tf.TensorSpec([None]), "task": ids, "support": part, "query": part}


def own_part(batches: Any, collection: EmbeddingCollection, tasks: bool, known: bool) -> tf.data.Dataset:
    data = tf.data.Dataset.from_generator(lambda: batches(collection), output_signature=signature(tasks))
    if known:
        data = data.apply(tf.data.experimental.assert_cardinality(sum(1 for _ in batches(collection))))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return data.with_options(options)


def ctr(optimizer: str) -> Model:
    x = {
        "user": tf.keras.Input([], name="user", dtype=tf.int64),
        "tags": tf.keras.Input([None], name="tags", dtype=tf.int64, ragged=True),
        "wide": tf.keras.Input([], name="wide", dtype=tf.int64),
    }
    sparse, dense = OPTIMIZERS[optimizer]
    vectors = EmbeddingCollection(FEATURES, optimizer=sparse(), name="collection")(x)
    hidden = tf.keras.layers.Concatenate()(list(vectors.values()))
    hidden = tf.keras.layers.Dense(
        8, "tanh", kernel_initializer=tf.keras.initializers.GlorotUniform(seed=collectives.world().rank)
    )(hidden)
    logit = tf.keras.layers.Dense(1, kernel_initializer=tf.keras.initializers.GlorotUniform(seed=3))(hidden)
    model = Model(x, logit)
    loss = tf.keras.losses.BinaryCrossentropy(from_logits=True)
    auc = tf.keras.metrics.AUC(from_logits=True, name="auc")  # slow to trace
    model.compile(dense(), loss, metrics=[auc, "mae"] if optimizer == "adam" else ["mae"])
    return model


# Over samples with MAML; over tasks with rows that adapt too, at learned rates; Reptile; and ridge.
LOOPS = {
    "maml": (InnerLoop(steps=2, learning_rate=0.05), "sample"),
    "rows": (InnerLoop(adapt="all", learning_rate=0.05, learn_learning_rate="layer", clip_norm=2.0), "task"),
    "reptile": (InnerLoop("reptile", steps=2, learning_rate=0.05), "sample"),
    "ridge": (InnerLoop("ridge"), "sample"),
}


def meta_model(kind: str, optimizer: str) -> MetaModel:
    sparse, dense = OPTIMIZERS[optimizer]
    inner, reduction = LOOPS[kind]
    model = MetaModel(
        EmbeddingCollection(FEATURES, optimizer=sparse(), name="collection"),
        MLP({"fc": 8, "out": 1}, seed=collectives.world().rank),
        inner=inner,
        reduction=reduction,
    )
    model.compile(dense(), "mse", metrics=["mae"])
    return model


def state(model: tf.keras.Model, collection: EmbeddingCollection) -> dict[str, Any]:
    """What this rank has after training."""
    here = collectives.world()
    tables = [sorted_records(table) for table in collection.tables]
    for records in tables:  # a rank holds what it owns, and nothing else
        owned = owned_shards(here.rank, here.size)
        assert all(shard in owned for shard in logical_shards(records["keys"]))
    return {
        "tables": tables,
        "dense": [weight.numpy() for weight in model.trainable_variables],
        "slots": [slot.numpy() for slot in model.optimizer.variables],
    }


def train(kind: str, optimizer: str, known: bool) -> dict[str, Any]:
    tasks = kind in LOOPS
    model = meta_model(kind, optimizer) if tasks else ctr(optimizer)
    collection = model.collection if tasks else model.get_layer("collection")
    batches = task_batches if tasks else ctr_batches
    data = own_part(batches, collection, tasks, known)
    with collectives.count_collectives() as counts:
        history = model.fit(data, verbose=0, epochs=1).history
    # Measuring is traced anew; one model of each kind is enough.
    measured = model.evaluate(data, verbose=0, return_dict=True) if optimizer == "adam" else {}
    return {**state(model, collection), "history": history, "measured": measured, "counts": counts.calls}


# Tracing is what takes the time: samples and tasks on two ranks. All kinds with both optimizers on all
# numbers of ranks, three and four too, is `make test-ranks`. Quick: on three, test_collectives.py.
CASES = [("ctr", "adagrad", False), ("maml", "adam", True)]
CASES_OF = {1: CASES, 2: CASES, 3: [], 4: []}
if "GMETA_ALL_CASES" in os.environ:
    CASES += [("ctr", "adam", True), ("rows", "adagrad", False), ("maml", "adagrad", False)]
    CASES += [("reptile", "adam", False), ("reptile", "adagrad", True), ("ridge", "adam", True)]
    CASES_OF = dict.fromkeys(CASES_OF, CASES)
ON_RANKS = [
    pytest.param(np_, case, id="-".join([str(np_), *case[:2]])) for np_ in (2, 3, 4) for case in CASES_OF[np_]
]


def work(cases: list[tuple[str, str, bool]]) -> dict[Any, Any]:
    """Runs on every rank."""
    return {case[:2]: train(*case) for case in cases}


@pytest.fixture(scope="module")
def runs() -> dict[int, list[dict[Any, Any]]]:
    on_ranks = {np_: run_ranks(work, np_, CASES_OF[np_], timeout=400) for np_ in (2, 3, 4) if CASES_OF[np_]}
    return {1: [work(CASES)], **on_ranks}


def whole(parts: list[dict[str, Any]], table: int, name: str) -> np.ndarray:
    """A table's records of all ranks, in the order of their keys."""
    order = np.argsort(np.concatenate([part["tables"][table]["keys"] for part in parts]))
    return np.concatenate([part["tables"][table][name] for part in parts])[order]


def assert_close(found: np.ndarray, expected: np.ndarray, name: str) -> None:
    """Agrees to 1e-5 of the size of the largest number in it."""
    size = np.abs(expected).max() if expected.size else 1.0
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * size, err_msg=name)


@pytest.mark.parametrize(("np_", "case"), ON_RANKS)
def test_tables_slots_and_weights_after_50_steps(runs: Any, np_: int, case: tuple[Any, ...]) -> None:
    ranks, (alone,) = [rank[case[:2]] for rank in runs[np_]], [rank[case[:2]] for rank in runs[1]]
    for table, records in enumerate(alone["tables"]):
        assert records["step"] == STEPS
        for name in ("keys", "frequency", "last_step"):
            np.testing.assert_array_equal(whole(ranks, table, name), records[name])
        for name in ("rows", "slots"):
            assert_close(whole(ranks, table, name), records[name], f"table {table} {name}")
    for name in ("dense", "slots"):
        for place, expected in enumerate(alone[name]):
            assert_close(ranks[0][name][place], expected, f"{name} {place}")
            for other in ranks[1:]:
                np.testing.assert_array_equal(other[name][place], ranks[0][name][place])


@pytest.mark.parametrize(("np_", "case"), ON_RANKS)
def test_metrics_are_those_of_all_samples_on_every_rank(runs: Any, np_: int, case: tuple[Any, ...]) -> None:
    ranks, (alone,) = [rank[case[:2]] for rank in runs[np_]], [rank[case[:2]] for rank in runs[1]]
    for rank in ranks:
        assert rank["measured"].keys() == alone["measured"].keys()
        for kind in ("measured", "history"):
            for name, value in alone[kind].items():
                np.testing.assert_allclose(rank[kind][name], value, rtol=1e-5, err_msg=name)
        assert rank["measured"] == ranks[0]["measured"]
        assert rank["history"] == ranks[0]["history"]


@pytest.mark.parametrize(("np_", "case"), ON_RANKS)
def test_a_step_makes_three_exchanges_and_one_all_reduce(runs: Any, np_: int, case: tuple[Any, ...]) -> None:
    counts = runs[np_][0][case[:2]]["counts"]
    # Ids, values, gradients, for two tables of three features. Where no rank could tell how many batches it
    # has, one more exchange of ids and values finds that all have ended. An epoch's metrics are one more.
    assert counts["alltoall"] == 3 * STEPS + (0 if case[2] else 2)
    assert counts["allreduce"] == STEPS + 1
    assert all(rank[case[:2]]["counts"]["alltoall"] == counts["alltoall"] for rank in runs[np_])
