"""Groups of ranks: copies of rows are equal to the last bit, and training is that of one group."""

from __future__ import annotations

import os
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gmeta
from gmeta.checkpoint import ShardedCheckpoint
from gmeta.checkpoint.callback import tables_by_name
from gmeta.checkpoint.manifest import Manifest
from gmeta.checkpoint.store import CheckpointStore
from gmeta.core import collectives
from gmeta.core.collectives.place import choose_groups
from gmeta.core.errors import ConfigError, RanksError
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig, record_lookups
from gmeta.ops.table.records import Statistics
from gmeta.optimizers import Momentum
from support import pipeline_runs
from support.pipeline_runs import KINDS, collections_of, differences, distances, make_model, train_at_depth
from support.process_ranks import run_ranks
from support.reference.table import logical_shards
from support.tables import sorted_records

pytestmark = pytest.mark.ranks

ALL = "GMETA_ALL_CASES" in os.environ
STRICT = 1e-6  # of sums in another order, relative to an array's largest number
# A rank's bound on rows, so they depend on how many ranks own them.
BOUNDED = {"recent", "frequent", "policies", "towers"}
NOT_SAMPLES = {"maml", "rows", "grm"}  # batches of ranks can't be joined as they are
OWN_COUNTS = ("capacity", "load_factor", "bytes")  # depend on how rows are divided
Run = tuple[str, int, int]  # kind, depth, micro-batches


def environment(groups: int, lane: str = "auto") -> dict[str, str]:
    return {"GMETA_GROUPS": str(groups), "GMETA_LANE": lane}


def train(kind: str, depth: int = 0, micro_batches: int = 1, callbacks: Any = ()) -> dict[str, Any]:
    optimizer = tf.keras.optimizers.SGD(0.05, momentum=0.5, global_clipnorm=1.0)
    return train_at_depth(
        kind,
        depth,
        micro_batches=micro_batches,
        dropout=0.0,
        epochs=1,
        callbacks=callbacks,
        optimizer=optimizer,
    )


def train_all(runs: list[Run], folder: Path | None) -> dict[Run, Any]:
    """Runs on every rank; the first run saves checkpoints."""
    found = {}
    for run in runs:
        saves = folder is not None and run == runs[0]
        found[run] = train(*run, callbacks=[ShardedCheckpoint(folder, every=5)] if saves else [])
    return found


def tables_of(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tables of some ranks together: records in the order of keys, and sums of their counts."""
    found: list[dict[str, Any]] = []
    for table in range(len(ranks[0]["records"])):
        parts = [rank["records"][table] for rank in ranks]
        order = np.argsort(np.concatenate([part["keys"] for part in parts]))
        records = {
            name: np.concatenate([part[name] for part in parts])[order] if value.ndim else value
            for name, value in parts[0].items()
        }
        counts = np.sum([rank["statistics"][table] for rank in ranks], axis=0)
        named = dict(zip(Statistics._fields, counts.tolist(), strict=True))
        found.append({**records, **{n: count for n, count in named.items() if n not in OWN_COUNTS}})
    return found


def far(one: Any, other: Any) -> dict[str, float]:
    return {path: d for path, d in distances(one, other).items() if not d <= STRICT}


RUNS: dict[tuple[str, int], list[Run]] = {  # lane and ranks, in 2 groups
    ("auto", 4): [("ctr", 1, 2)],  # quick: of Horovod's lane, test_collectives.py
}
if ALL:
    ways = [(0, 1), (1, 1), (2, 1), (0, 2), (1, 2)]
    every = [(kind, *way) for kind in KINDS for way in ways]
    RUNS = {(lane, np_): every for lane in ("auto", "horovod") for np_ in (4, 2)}


@pytest.fixture(scope="module", params=RUNS, ids="-".join("%s" for _ in "ab").__mod__)
def job(request: Any, tmp_path_factory: Any) -> tuple[str, list[dict[Run, Any]], Path]:
    """The lane, what each rank has, and a folder of checkpoints."""
    lane, np_ = request.param
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    runs = RUNS[request.param]
    found = run_ranks(train_all, np_, runs, folder, environment=environment(2, lane), timeout=3600)
    return lane, found, folder


@pytest.mark.shown_by("test_rows_travel_within_a_group_and_sums_once_between_groups")
def test_copies_of_rows_are_equal_to_the_last_bit(job: Any) -> None:
    _, ranks, _ = job
    size = len(ranks) // 2
    for run in ranks[0]:
        for own, copy in zip(ranks[:size], ranks[size:], strict=True):
            same = {name: own[run][name] for name in ("records", "statistics", "dense", "slots")}
            assert differences(same, copy[run]) == []
        assert all(len(records["keys"]) for rank in ranks for records in rank[run]["records"])


@pytest.mark.skipif(not ALL, reason="the other tests run with a pipeline")
def test_a_pipeline_changes_nothing(job: Any) -> None:
    _, ranks, _ = job
    for found in ranks:
        for (kind, depth, micro_batches), ahead in found.items():
            if depth and (kind, 0, micro_batches) in found:
                assert differences(found[kind, 0, micro_batches], ahead) == []
            elif micro_batches > 1:
                exact = {name: ahead[name] for name in ("history", "dense", "records", "statistics")}
                assert far(exact, found[kind, 0, 1]) == {}


@pytest.mark.shown_by("test_rows_travel_within_a_group_and_sums_once_between_groups")
def test_training_is_that_of_one_rank(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups admit, count and evict what one rank does on all batches together."""
    _, ranks, _ = job
    monkeypatch.setattr(pipeline_runs, "make_model", lambda kind, _: (make_model(kind, 0.0)[0], united))
    for run in ranks[0]:
        if run[0] in NOT_SAMPLES or (run[0] in BOUNDED and len(ranks) > 2):
            continue
        united = joined(run[0], len(ranks))
        alone = train(run[0])
        grouped = tables_of([rank[run] for rank in ranks[: len(ranks) // 2]])
        assert far(tables_of([alone]), grouped) == {}
        assert far({"dense": alone["dense"]}, ranks[0][run]) == {}


@pytest.mark.skipif(not ALL, reason="one rank does")
def test_training_is_that_of_one_group(job: Any) -> None:
    lane, ranks, _ = job
    plain = [run for run in ranks[0] if run[1:] == (0, 1) and run[0] not in BOUNDED]
    alone = run_ranks(train_all, len(ranks), plain, None, environment=environment(1, lane), timeout=3600)
    for run in plain:
        grouped = tables_of([rank[run] for rank in ranks[: len(ranks) // 2]])
        assert far(tables_of([rank[run] for rank in alone]), grouped) == {}
        assert far({name: alone[0][run][name] for name in ("history", "dense")}, ranks[0][run]) == {}


def joined(kind: str, size: int) -> Any:
    """The batches of all ranks as one, of each step."""
    by_rank, (_, batches_of) = [], make_model(kind, 0.0)
    for rank in range(size):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives, "world", lambda rank=rank: collectives.World(rank, size, rank))
            by_rank.append(list(batches_of()))
    parts = [[part for part in of_step if part is not None] for of_step in zip_longest(*by_rank)]
    batches = [tf.nest.map_structure(lambda *p: tf.concat(p, axis=0), *of_step) for of_step in parts]
    return lambda: iter(batches)


def load(kind: str, folder: Path, save_to: Path | None) -> dict[str, Any]:
    """Runs on every rank: what it loads; saves that again."""
    model, _ = make_model(kind)
    model.compile(tf.keras.optimizers.SGD(0.05, momentum=0.5), "mse")
    tables = tables_by_name(model)
    CheckpointStore(folder).load(tables)
    if save_to is not None:
        saved = CheckpointStore(save_to).save(tables, step=100)
        assert bool(saved.rows) == (collectives.world().group == 0)
    own = [table for each in collections_of(model) for table in each.tables]
    return {
        "records": [sorted_records(table) for table in own],
        "statistics": [[int(count) for count in table.statistics()] for table in own],
    }


def records_of(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = ("keys", "rows", "slots", "frequency", "last_step", "step")
    return [{name: table[name] for name in names} for table in tables_of(ranks)]


@pytest.mark.shown_by("test_rows_travel_within_a_group_and_sums_once_between_groups")
def test_checkpoints_load_with_any_number_of_groups(job: Any, tmp_path: Path) -> None:
    _, ranks, folder = job
    run = next(iter(ranks[0]))
    if run[0] in BOUNDED:
        return
    size = len(ranks) // 2
    manifest = Manifest.load(CheckpointStore(folder).latest() or folder)
    assert manifest.world_size == size  # of each row one copy is saved
    expected = records_of([rank[run] for rank in ranks[:size]])
    again = tmp_path / "again"
    one_group = run_ranks(load, 2, run[0], folder, again, environment=environment(1))
    assert differences(expected, records_of(one_group)) == []
    groups = run_ranks(load, len(ranks) if ALL else 2, run[0], again, None, environment=environment(2))
    for group in (groups[: len(groups) // 2], groups[len(groups) // 2 :]):
        assert differences(expected, records_of(group)) == []


DIM = 4


def ids_of(rank: int) -> dict[str, np.ndarray]:
    """A feature that the loss depends on, and one that is only read."""
    draw = np.random.default_rng(rank)
    return {name: draw.integers(0, 60, 20) for name in ("used", "read")}


def by_hand() -> EmbeddingCollection:
    table = TableConfig("ids", DIM)
    features = [FeatureConfig(name, table) for name in ("used", "read")]
    return EmbeddingCollection(features, optimizer=Momentum(0.1, 0.5))


def step_by_hand() -> dict[str, Any]:
    """Runs on every rank: one lookup and update, and what they send; then an exchange of only some ranks."""
    here = gmeta.init(groups=2)  # as the environment says
    with pytest.raises(ConfigError, match="one of 2 groups already"):
        gmeta.init(groups=4)
    collection = by_hand()
    ids = {name: tf.constant(of_feature) for name, of_feature in ids_of(here.rank).items()}
    found: dict[str, Any] = {"sent": {}}
    plain = collectives.alltoall

    def count(*args: Any, name: str, **kwargs: Any) -> Any:
        with collectives.count_collectives() as counts:
            result = plain(*args, name=name, **kwargs)
        found["sent"][name.split("/")[-1]] = counts.bytes.get("alltoall", 0)
        return result

    collectives.alltoall = count
    with tf.GradientTape() as tape, record_lookups(tape) as lookups:
        loss = tf.reduce_sum(collection(ids, training=True)["used"] * (here.rank + 1.0))
    lookups.apply_gradients(tape.gradient(loss, lookups.rows))
    collectives.alltoall = plain
    found["records"] = sorted_records(collection.tables[0])
    found["updates"] = int(collection.tables[0].statistics().updates)
    rows = tf.Variable([[float(here.rank)], [10.0 + here.rank]])
    with tf.GradientTape() as tape:
        came, splits = collectives.alltoall(rows, tf.constant([1, 1]), name="some", ranks=here.replicas)
        total = tf.reduce_sum(came * [[2.0], [3.0]])
    found["some"] = came.numpy().tolist(), splits.numpy().tolist()
    found["back"] = tape.gradient(total, rows).numpy().tolist()
    return found


@pytest.mark.parametrize("lane", ["horovod", "tcp"] if ALL else ["tcp"])
def test_rows_travel_within_a_group_and_sums_once_between_groups(lane: str) -> None:
    collection = by_hand()
    prefix = collection.merged[0].key_prefix(collection.features[0])
    owners = {key: int(logical_shards([key | prefix])[0]) // 512 for key in range(60)}
    used = [set(ids_of(rank)["used"].tolist()) for rank in range(4)]
    keys = [used[rank] | set(ids_of(rank)["read"].tolist()) for rank in range(4)]
    owned = [{k for k in keys[r // 2 * 2] | keys[r // 2 * 2 + 1] if owners[k] == r % 2} for r in range(4)]
    ranks = run_ranks(step_by_hand, 4, environment=environment(2, lane))
    alone, weights = by_hand(), np.repeat(np.arange(1.0, 5.0, dtype=np.float32), 20)
    of_all = {name: np.concatenate([ids_of(rank)[name] for rank in range(4)]) for name in ("used", "read")}
    with tf.GradientTape() as tape, record_lookups(tape) as lookups:
        loss = tf.reduce_sum(alone(of_all, training=True)["used"] * weights[:, None])
    lookups.apply_gradients(tape.gradient(loss, lookups.rows))
    expected = sorted_records(alone.tables[0])
    for group in (ranks[:2], ranks[2:]):
        order = np.argsort(np.concatenate([found["records"]["keys"] for found in group]))
        for name in ("keys", "rows", "slots"):
            whole = np.concatenate([found["records"][name] for found in group])[order]
            np.testing.assert_allclose(whole, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
    for rank, found in enumerate(ranks):
        peer, row = rank ^ 1, 4 * DIM
        asks = sum(owners[key] == peer % 2 for key in keys[rank])
        gives = sum(owners[key] == rank % 2 for key in keys[peer])
        assert found["sent"] == {
            "keys": 8 * (2 + asks),  # with a number of samples and one of keys
            "group_keys": 8 * (3 + len(owned[rank])),  # with the numbers of samples of two ranks
            "values": row * gives,
            "gradients": row * asks,
            "group_gradients": row * len(owned[rank]),
        }
        copy = ranks[rank ^ 2]
        assert differences(found["records"], copy["records"]) == []
        assert len(found["records"]["keys"]) == len(owned[rank] | owned[rank ^ 2])
        moved = {key for key in set().union(*used) if owners[key] == rank % 2}
        assert found["updates"] == len(moved) < len(owned[rank] | owned[rank ^ 2])
        assert np.count_nonzero(found["records"]["slots"].any(axis=1)) == len(moved)
        first, second = sorted([rank, rank ^ 2])
        place = 0 if rank < 2 else 1
        assert found["some"] == ([[first + 10.0 * place], [second + 10.0 * place]], [1, 1])
        assert found["back"] == [[[2.0], [2.0]], [[3.0], [3.0]]][place]


def test_a_number_of_ranks_that_groups_do_not_divide_is_refused() -> None:
    with pytest.raises(RanksError, match="3 ranks can't form 2 groups of equal size: start a multiple of 2"):
        run_ranks(collectives.world, 3, environment=environment(2))


@pytest.mark.parametrize(
    ("given", "text", "why"),
    [
        (None, "0", "GMETA_GROUPS='0' is no number of groups"),
        (None, "two", "GMETA_GROUPS='two' is no number of groups"),
        (0, None, "groups=0 is no number of groups"),
        (2, "4", "groups=2, but GMETA_GROUPS=4"),
        (8, None, "4 ranks can't form 8 groups"),
    ],
)
def test_a_wrong_number_of_groups_is_refused(
    given: int | None, text: str | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        monkeypatch.setenv("GMETA_GROUPS", text)
    with pytest.raises(ConfigError, match=why):
        choose_groups(given, 4)


def test_places_in_groups() -> None:
    worlds = [collectives.World(rank, 6, 0, 3) for rank in range(6)]
    assert [list(world.group_ranks) for world in worlds] == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]]
    assert [list(world.replicas) for world in worlds] == [[0, 2, 4], [1, 3, 5]] * 3
    assert [(world.group, world.group_rank) for world in worlds[2:4]] == [(1, 0), (1, 1)]
