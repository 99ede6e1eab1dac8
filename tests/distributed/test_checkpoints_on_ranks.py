"""Sharded checkpoints of ranks: another number goes on with them, and what fails on one fails on all."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gmeta.checkpoint import sharded as sharded_checkpoint
from gmeta.checkpoint.callback import ShardedCheckpoint, tables_by_name
from gmeta.checkpoint.files import rank_group as ranks
from gmeta.checkpoint.files.chain import read_links
from gmeta.checkpoint.files.manifest import Manifest
from gmeta.core import collectives
from gmeta.core.errors import GmetaError
from gmeta.initializers import Normal
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import Model
from gmeta.optimizers import Adam
from gmeta.testing.jobs.process_ranks import run_ranks
from gmeta.testing.jobs.tracing import leave_keras_as_it_is
from gmeta.testing.tables import sorted_records

pytestmark = pytest.mark.ranks

SAMPLES, STEPS = 24, 3  # of a global batch, and of an epoch
STAGES = (4, 2, 3, 1)  # ranks of one epoch after another


def model() -> Model:
    leave_keras_as_it_is()
    start = Normal(0.0, 0.3)
    features = [
        FeatureConfig("user", TableConfig("user", 4, initializer=start)),
        FeatureConfig("item", TableConfig("item", 2, initializer=start)),
    ]
    x = {f.name: tf.keras.Input([], name=f.name, dtype=tf.int64) for f in features}
    vectors = EmbeddingCollection(features, optimizer=Adam(0.05), name="tables")(x)
    hidden = tf.keras.layers.Concatenate()(list(vectors.values()))
    kernel = tf.keras.initializers.GlorotUniform(seed=1)
    made = Model(x, tf.keras.layers.Dense(1, kernel_initializer=kernel)(hidden))
    made.compile(tf.keras.optimizers.Adam(0.02), "mse")
    return made


def data(epoch: int, size: int) -> tf.data.Dataset:
    """An epoch in elements of which ``size`` are a global batch."""
    rng = np.random.default_rng([3, epoch])
    n = SAMPLES * STEPS
    x = {"user": rng.integers(0, 20, n), "item": np.minimum(rng.zipf(1.3, n), 90)}
    samples = tf.data.Dataset.from_tensor_slices((x, rng.normal(size=(n, 1)).astype("f")))
    return samples.batch(SAMPLES // size)


def state(made: Model) -> dict[str, Any]:
    return {
        "tables": {name: sorted_records(table) for name, table in tables_by_name(made).items()},
        "dense": [weight.numpy() for weight in [*made.weights, *made.optimizer.variables]],
    }


def stage(folder: Path, epoch: int) -> dict[str, Any]:
    """Go on with one epoch, on however many ranks these are."""
    made, checkpoints = model(), ShardedCheckpoint(folder)
    loaded = []
    load = checkpoints.store.load
    checkpoints.store.load = lambda *a: loaded.append(load(*a)) or loaded[-1]
    first = checkpoints.restore(made)
    saved = checkpoints.store.latest()
    held = [int(table.size()) for table in tables_by_name(made).values()]
    batches = data(epoch, collectives.world().size)
    made.fit(batches, initial_epoch=epoch, epochs=epoch + 1, verbose=0, callbacks=[checkpoints])
    read = sum(info.bytes for info in loaded)
    return {**state(made), "first": first, "read": read, "saved": saved, "held": sum(held)}


def stored(checkpoint: Path) -> tuple[int, int]:
    """The bytes of all logical shards in a checkpoint and those that it continues, and its rows."""
    tables = [table for link in read_links(checkpoint) for table in link.manifest.tables.values()]
    files = [file for table in tables for part in table.parts for file in part.files]
    live = [sum(part.live) for table in Manifest.load(checkpoint).tables.values() for part in table.parts]
    return sum(segment.bytes for file in files for segment in file.segments), sum(live)


def alone() -> dict[str, Any]:
    made = model()
    for epoch in range(len(STAGES)):
        made.fit(data(epoch, 1), initial_epoch=epoch, epochs=epoch + 1, verbose=0)
    return state(made)


def on_ranks(work: Any, size: int, *args: Any) -> list[Any]:
    """One rank needs no process of its own."""
    return run_ranks(work, size, *args) if size > 1 else [work(*args)]


def test_4_ranks_2_3_and_1_go_on_with_one_run_and_it_is_one_ranks(tmp_path: Path) -> None:
    for epoch, size in enumerate(STAGES):
        ranks = on_ranks(stage, size, tmp_path / "run", epoch)
        assert [rank["first"] for rank in ranks] == [epoch] * size
        if epoch:
            assert Manifest.load(ranks[0]["saved"]).world_size == STAGES[epoch - 1]
            size_of_all, rows = stored(ranks[0]["saved"])
            assert sum(rank["read"] for rank in ranks) == size_of_all > 0  # each byte once
            assert all(rank["read"] < size_of_all for rank in ranks) or size == 1
            assert sum(rank["held"] for rank in ranks) == rows
        for rank in ranks[1:]:
            for mine, first in zip(rank["dense"], ranks[0]["dense"], strict=True):
                np.testing.assert_array_equal(mine, first)
    (last,), expected = ranks, alone()
    for name, records in expected["tables"].items():
        for field, values in records.items():
            np.testing.assert_allclose(last["tables"][name][field], values, 1e-5, 1e-6, err_msg=field)
    for mine, value in zip(last["dense"], expected["dense"], strict=True):
        np.testing.assert_allclose(mine, value, rtol=1e-5, atol=1e-6)


def caught(work: Any) -> str:
    try:
        work()
    except GmetaError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def faults(folder: Path) -> dict[str, Any]:
    """Disks that fill on one rank, and a part that only one rank reads, damaged."""
    here = collectives.world()
    made, checkpoints = model(), ShardedCheckpoint(folder)
    made.fit(data(0, here.size), epochs=1, verbose=0, callbacks=[checkpoints])
    before = checkpoints.store.latest()
    said = {}

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def fit() -> None:
        made.fit(data(1, here.size), initial_epoch=1, epochs=2, verbose=0, callbacks=[checkpoints])

    for place, rank in (("save_table", 1), ("_commit", 0)):
        original = getattr(sharded_checkpoint, place)
        if here.rank == rank:
            setattr(sharded_checkpoint, place, full)
        said[place] = caught(fit)
        setattr(sharded_checkpoint, place, original)
        assert checkpoints.store.latest() == before
    fit()  # the disk has room again
    said["latest"] = checkpoints.store.latest().name

    collectives.barrier()
    latest = checkpoints.store.latest()
    if here.rank == 0:
        for file in sorted(latest.glob("*/rows-00001-of-00002.arrow")):
            content = bytearray(file.read_bytes())
            content[len(content) // 3] ^= 1
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
    collectives.barrier()
    said["load"] = caught(lambda: ShardedCheckpoint(folder).restore(model()))
    # A rank that takes long to save says so, for the others not to think that it hangs.
    ranks._BEAT = 0.5
    heard: list[Any] = []

    def gather(what: Any) -> list[Any]:
        heard.append(collectives.allgather_objects(what))
        return heard[-1]

    with ranks.Ranks.of(gather=gather).together():
        deadline = time.monotonic() + 60 * here.rank
        while len(heard) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
    said["heard"] = [words.count("working") > 0 for words in heard]
    return said


@pytest.mark.usefixtures("ranks_by")
def test_what_fails_on_one_rank_is_raised_by_all_with_its_number(tmp_path: Path) -> None:
    both = run_ranks(faults, 2, tmp_path / "run")
    assert both[0] == both[1]
    said = both[0]
    assert said["save_table"].startswith("GmetaError: rank 1 of 2: ")
    assert "can't be written: No space left on device; make room" in said["save_table"]
    assert said["_commit"].startswith("GmetaError: rank 0 of 2: ")
    assert said["latest"].startswith("step-")
    *while_it_worked, at_last = said["heard"]
    assert len(while_it_worked) >= 3
    assert all(while_it_worked)
    assert not at_last
    assert said["load"].startswith("DataError: rank 1 of 2: ")
    assert "rows-00001-of-00002.arrow" in said["load"]


def middle(folder: Path, restored: bool) -> dict[str, Any]:
    """Save in the middle of an epoch of one-sample batches, or go on from there."""
    here = collectives.world()
    made, checkpoints = model(), ShardedCheckpoint(folder, every=None if restored else 4)
    every = tf.data.Dataset.range(30)
    if not restored:
        made.fit(data(0, 24).take(24), epochs=1, verbose=0, callbacks=[checkpoints])
        return {}
    checkpoints.restore(made, checkpoints.store.checkpoints()[0])
    own = every.shard(here.size, here.rank)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    seen = [int(i) for i in checkpoints.rest_of_epoch(own.with_options(options))]
    rest = [int(i) for i in checkpoints.rest_of_epoch(every)]
    return {"own": seen, "all": rest, "passed": checkpoints.batches_of_epoch}


@pytest.mark.slow
def test_another_number_of_ranks_goes_on_inside_an_epoch_with_what_is_left_of_it(tmp_path: Path) -> None:
    run_ranks(middle, 3, tmp_path, False)  # 4 steps of 3 batches
    for size in (1, 2):
        ranks = on_ranks(middle, size, tmp_path, True)
        assert [rank["passed"] for rank in ranks] == [12] * size
        assert sorted(i for rank in ranks for i in rank["own"]) == list(range(12, 30))
        assert all(rank["all"] == list(range(12, 30)) for rank in ranks)
