"""Ranks publish together what one process with all their rows would, and fail together."""

from __future__ import annotations

import errno
import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gmeta import Pipeline, initializers, optimizers, policies
from gmeta.checkpoint.sharded import load, save
from gmeta.core import collectives
from gmeta.core.errors import CollectiveError, GmetaError, RanksError
from gmeta.export import Publisher, publisher, table_changes
from gmeta.export.delta_signatures import tables_of
from gmeta.export.model_deltas import Delta, Layout
from gmeta.export.published_folder import PublishedFolder
from gmeta.export.signature import OUTPUT, Signature, feature_inputs
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import Model
from support.process_ranks import run_ranks
from support.serving import ask_all

pytestmark = pytest.mark.ranks

NORMAL = initializers.Normal(0, 1)
FEATURES = (
    FeatureConfig("user", TableConfig("user", 4, initializer=NORMAL)),
    FeatureConfig("item", TableConfig("item", 4, initializer=NORMAL)),  # merged with users
    FeatureConfig("place", TableConfig("place", 3, initializer=NORMAL, eviction=policies.LRU(max_rows=200))),
)
ASKED = {feature.name: np.arange(2000) for feature in FEATURES}


def contents(folder: Path) -> tuple[list[int], list[int]]:
    """The versions of the SavedModels and of the deltas in a folder."""
    found = PublishedFolder(folder).contents()
    return [*found.models], [span.version for span in found.deltas]


class Scores(Model):
    def __init__(self) -> None:
        super().__init__(name="scores")
        self.collection = EmbeddingCollection(FEATURES, optimizer=optimizers.Adam(0.1), seed=3)
        self.dense = tf.keras.layers.Dense(1, kernel_initializer=tf.keras.initializers.GlorotUniform(1))

    def call(self, inputs: Any, training: bool = False) -> tf.Tensor:
        vectors = self.collection(inputs, training=training)
        return self.dense(tf.concat([*vectors.values()], axis=-1))[:, 0]


def make_model() -> Scores:
    model = Scores()
    model({name: tf.constant(ids[:2]) for name, ids in ASKED.items()})
    return model


def train(model: Scores, seed: int) -> None:
    """A step on distinct ids, whose gradients are functions of the seed; `place` evicts others."""
    here, random = collectives.world(), np.random.default_rng(seed)
    ids = {name: random.permutation(900)[:400] for name in ASKED}
    ids["place"] += 300 * seed
    share = slice(here.rank, None, here.size)
    lookup = model.collection.lookup({name: tf.constant(ids[name][share]) for name in ids}, insert=True)
    # A row's gradient is a function of its key, so that it is the same on any number of ranks.
    rows = [
        tf.cast(keys[:, tf.newaxis] % 7 - 3 + seed % 3, tf.float32) * tf.ones_like(rows)
        for keys, rows in zip(lookup.keys, lookup.rows, strict=True)
    ]
    model.collection.apply_gradients(lookup, rows)
    for weight in model.dense.weights:
        weight.assign_add(tf.constant(random.normal(size=weight.shape), tf.float32))


def vectors(model: Scores) -> dict[str, Any]:
    collection = model.collection
    inputs = feature_inputs(collection.features)
    embed = Signature(lambda ids: collection.embed(collection.lookup(ids, insert=False)), inputs)
    score = Signature(lambda ids: model(ids, training=False), inputs)
    return {"signatures": {"vectors": embed, "score": score}}


def work(folder: Path, external: bool) -> list[tuple[int, str, int, int]]:
    """Publish a SavedModel and three deltas, each with a checkpoint of the same moment beside it."""
    model = make_model()
    tables = {table.name: table for table in tables_of(model)}
    export = {"external": ["user", "item"], "signatures": {"score": vectors(model)["signatures"]["score"]}}
    one = Publisher(model, folder / "online", export=export if external else vectors(model))
    seen: list[Any] = []
    one.listeners.append(seen.append)
    train(model, 0)
    one.publish()
    for seed in (1, 2, 3):
        train(model, seed)
        base = folder / f"checkpoint-{seed - 1}"
        save(folder / f"checkpoint-{seed}", tables, base=base if base.exists() else None, journal=10_000)
        if seed == 2:
            train(model, 102)  # after the checkpoint has emptied the journals
            tables_of(model)[-1].remove(tf.range(40, dtype=tf.int64))  # each rank, those that it has
        if seed == 3:
            one.publish_base()
        else:
            one.publish()
        save(folder / f"then-{seed}", tables)
        if collectives.world().rank == 0:
            np.savez(folder / f"dense-{seed}.npz", *[weight.numpy() for weight in model.dense.weights])
    return [(each.version, str(each.path), each.rows, each.removed) for each in seen]


Run = tuple[Path, list[list[tuple[int, str, int, int]]]]
RUNS = {"1": (1, 1), "2": (2, 1), "3": (3, 1), "4 in groups": (4, 2)}  # ranks and groups


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    @functools.cache
    def run(name: str) -> Run:
        folder, (ranks, groups) = tmp_path_factory.mktemp("ranks"), RUNS[name]
        return folder, run_ranks(work, ranks, folder, False, environment={"GMETA_GROUPS": str(groups)})

    return run


def held(folder: Path, seed: int) -> Scores:
    """A model of one process with the rows and weights of a moment."""
    model = make_model()
    load(folder / f"then-{seed}", {table.name: table for table in tables_of(model)})
    with np.load(folder / f"dense-{seed}.npz") as weights:
        for weight, name in zip(model.dense.weights, weights, strict=True):
            weight.assign(weights[name])
    return model


@pytest.mark.shown_by(case="2")
@pytest.mark.parametrize("name", ["2", "3", "4 in groups"])
def test_servers_answer_as_one_process_with_the_same_rows(run_of: Callable[[str], Run], name: str) -> None:
    folder, by_rank = run_of(name)
    assert all(rank == by_rank[0] for rank in by_rank)  # all ranks know what was published
    assert [version for version, *_ in by_rank[0]] == [1, 2, 3, 4]
    assert by_rank[0][2][3] > 100  # removed
    base, last = folder / "online/model/1", folder / "online/model/4"
    requests = []
    for _, path, *_ in by_rank[0][1:3]:
        requests.append((base, "apply_delta", {"delta_bytes": np.array(Path(path).read_bytes(), object)}))
        requests += [(base, "vectors", ASKED), (base, "score", ASKED)]
    requests += [(last, "vectors", ASKED), (last, "score", ASKED)]
    answers = ask_all(requests)
    for seed, rows, score in ((1, *answers[1:3]), (2, *answers[4:6]), (3, *answers[6:8])):
        model = held(folder, seed)
        ids = {key: tf.constant(value) for key, value in ASKED.items()}
        for key, right in model.collection.embed(model.collection.lookup(ids, insert=False)).items():
            np.testing.assert_array_equal(rows[key], right, key)
        np.testing.assert_allclose(score[OUTPUT], model(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.shown_by("test_servers_answer_as_one_process_with_the_same_rows")
def test_deltas_are_those_of_one_process(run_of: Callable[[str], Run]) -> None:
    """But for `place`, whose bound on rows is a rank's."""
    found = {}
    for name in RUNS:
        folder, _ = run_of(name)
        layout = Layout.load(folder / "online/stream.json")
        assert contents(folder / "online")[1] == [2, 3]
        paths = [folder / f"online/deltas/{version:012d}.delta" for version in (2, 3)]
        found[name] = [Delta.decode(path.read_bytes(), layout) for path in paths]
    for name, deltas in found.items():
        for one, other in zip(found["1"], deltas, strict=True):
            for table, change in one.tables.items():
                if not table.endswith("place"):
                    for part in ("ids", "rows", "removed"):
                        np.testing.assert_array_equal(
                            getattr(change, part), getattr(other.tables[table], part), f"{name} {table}"
                        )
            for weight, value in one.dense.items():
                np.testing.assert_array_equal(value, other.dense[weight])


@pytest.mark.shown_by("test_servers_answer_as_one_process_with_the_same_rows")
def test_external_rows_of_all_ranks_are_written(tmp_path: Path) -> None:
    rows = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        run_ranks(work, ranks, folder, True)
        layout = Layout.load(folder / "online/stream.json")
        names = PublishedFolder(folder / "online").contents().rows[1]
        parts = [Delta.decode((folder / "online" / name).read_bytes(), layout) for name in names]
        rows.append(
            {
                table: [
                    np.concatenate([getattr(part.tables[table], column) for part in parts])
                    for column in ("ids", "rows")
                ]
                for table in layout.tables
            }
        )
    for table, one in rows[0].items():
        for column, other in zip(one, rows[1][table], strict=True):
            np.testing.assert_array_equal(column, other, table)
    assert sum(len(ids) for ids, _ in rows[0].values()) == 800


def failing(folder: Path) -> dict[str, Any]:
    """What all ranks raise when one fails, and the versions that follow."""
    here, model = collectives.world(), make_model()
    one = Publisher(model, folder, export=vectors(model))
    found: dict[str, Any] = {}
    train(model, 0)
    one.publish()

    def attempt(what: str) -> None:
        try:
            one.publish()
        except (GmetaError, OSError) as error:
            found[what] = type(error).__name__, str(error)

    usual = PublishedFolder.write
    if here.rank == 0:

        def full(folder: PublishedFolder, delta: Delta, layout: Layout) -> Any:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder))

        PublishedFolder.write = full
    train(model, 1)
    attempt("full")
    PublishedFolder.write = usual
    weight = model.dense.weights[0]
    good = weight.numpy()
    if here.rank == 1:
        weight.assign(good * np.nan)
    attempt("weights")
    weight.assign(good)
    found["version"] = one.publish().version
    table = tables_of(model)[0]
    records = table.export()
    if here.rank == 1:
        table.import_(records._replace(rows=records.rows * np.nan))  # which breaks this rank's journal alone
    attempt("rows")
    if here.rank == 1:
        table.import_(records)
    train(model, 2)
    published = one.publish()
    found["after"] = published.version, published.path.parent.name
    train(model, 3)
    found["last"] = one.publish().version
    return found


@pytest.mark.usefixtures("ranks_by")
@pytest.mark.shown_by(
    "distributed/test_checkpoints_on_ranks.py::test_what_fails_on_one_rank_is_raised_by_all_with_its_number"
)
def test_an_error_on_one_rank_is_raised_by_all(tmp_path: Path) -> None:
    first, second = run_ranks(failing, 2, tmp_path / "online")
    for found in (first, second):
        assert found["full"][0] in ("GmetaError", "OSError")
        assert "No space left on device" in found["full"][1]
        assert found["weights"][0] == found["rows"][0] == "NotFiniteError"
        assert "rank 1 of 2: weight" in found["weights"][1]
        assert "hold NaN or infinity" in found["rows"][1]
        assert (found["version"], found["after"], found["last"]) == (3, (5, "model"), 6)
    assert contents(tmp_path / "online") == ([1, 5], [3, 6])


def killed(folder: Path, when: int) -> None:
    """Rank 1 is killed while it sends its rows, of the SavedModel or of the delta."""
    here, model = collectives.world(), make_model()
    one = Publisher(model, folder, export=vectors(model))
    usual = table_changes._send

    def send(rows: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    for number in range(3):
        train(model, number)
        if number == when and here.rank == 1:
            table_changes._send = send
        try:
            one.publish()
        except CollectiveError:
            time.sleep(600)  # the launcher ends this rank
    table_changes._send = usual


@pytest.mark.usefixtures("ranks_by")
@pytest.mark.shown_by(
    "distributed/test_checkpoints_on_ranks.py::test_what_fails_on_one_rank_is_raised_by_all_with_its_number"
)
def test_a_killed_rank_ends_the_job_and_the_folder_goes_on(tmp_path: Path) -> None:
    with pytest.raises(RanksError, match="rank 1 of 2 was killed by SIGKILL"):
        run_ranks(killed, 2, tmp_path / "online", 1, grace=5.0)
    assert contents(tmp_path / "online") == ([1], [])
    run_ranks(killed, 2, tmp_path / "online", 9)
    assert contents(tmp_path / "online") == ([1, 2], [3, 4])


def with_other_clocks(folder: Path) -> list[int]:
    """Each rank's clock says something else; rank 0's decides."""
    here = collectives.world()
    inputs = {"user": tf.keras.Input([], name="user", dtype=tf.int64)}
    collection = EmbeddingCollection([FeatureConfig("user", TableConfig("user", 4))])
    model = Model(inputs, tf.keras.layers.Dense(1)(collection(inputs)["user"]))
    model.compile("adam", "mse", pipeline=Pipeline(depth=2))

    class Clock:
        perf_counter, time = publisher.time.perf_counter, publisher.time.time
        ticks = 0.0

        def monotonic(self) -> float:
            self.ticks += 1.0
            return self.ticks if here.rank == 0 else 0.0

    publisher.time = Clock()
    one = Publisher(model, folder, every="20s", dense_every="30s")
    seen: list[int] = []
    one.listeners.append(lambda published: seen.append(published.version if published else 0))
    data = {"user": np.arange(96)}, np.ones(96, np.float32)
    model.fit(*data, batch_size=4, epochs=2, verbose=0, callbacks=[one])
    one.publish_due()
    return seen


@pytest.mark.shown_by("test_servers_answer_as_one_process_with_the_same_rows")
def test_the_clock_of_rank_0_decides(tmp_path: Path) -> None:
    first, second = run_ranks(with_other_clocks, 2, tmp_path / "online")
    assert first == second
    assert len(first) > 3
    assert first == sorted(set(first))
