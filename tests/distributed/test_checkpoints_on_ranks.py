"""Sharded checkpoints of ranks: another number goes on with them, and what fails on one fails on all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gmeta.checkpoint import sharded as sharded_checkpoint
from gmeta.checkpoint.callback import ShardedCheckpoint, tables_by_name
from gmeta.checkpoint.chain import read_links
from gmeta.checkpoint.manifest import Manifest
from gmeta.core import collectives
from gmeta.core.collectives import rank_group as ranks
from gmeta.core.errors import ConfigError, GmetaError
from gmeta.initializers import Normal
from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.models import Model
from gmeta.ops.table.records import tables_saved_elsewhere
from gmeta.optimizers import Adam
from support.process_ranks import run_ranks
from support.tables import sorted_records

pytestmark = pytest.mark.ranks

SAMPLES, STEPS = 24, 3  # of a global batch, and of an epoch
# Ranks of one epoch after another. Quick: fewer, more, and one.
STAGES = (4, 2, 3, 1) if "GMETA_ALL_CASES" in os.environ else (3, 2, 1)


def model(**options: Any) -> Model:
    """A model; with ``run_eagerly`` where so few steps take less time than to trace one."""
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
    made.compile(tf.keras.optimizers.Adam(0.02), "mse", **options)
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
    made, checkpoints = model(run_eagerly=True), ShardedCheckpoint(folder)
    loaded = []
    load = checkpoints.store.load
    checkpoints.store.load = lambda *a, **k: loaded.append(load(*a, **k)) or loaded[-1]
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
    made = model(run_eagerly=True)
    for epoch in range(len(STAGES)):
        made.fit(data(epoch, 1), initial_epoch=epoch, epochs=epoch + 1, verbose=0)
    return state(made)


def on_ranks(work: Any, size: int, *args: Any) -> list[Any]:
    """One rank needs no process of its own."""
    return run_ranks(work, size, *args) if size > 1 else [work(*args)]


def test_other_numbers_of_ranks_go_on_with_one_run_and_it_is_one_ranks(tmp_path: Path) -> None:
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
    made, checkpoints = model(run_eagerly=True), ShardedCheckpoint(folder)
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


# Quick: gmeta; of Horovod's lanes, test_faults.py.
@pytest.mark.parametrize(
    "ranks_by", [pytest.param("horovod", marks=pytest.mark.slow), "gmeta"], indirect=True
)
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


class Killed(tf.keras.callbacks.Callback):
    """Ends training as a signal would, in the third epoch, after some of its batches."""

    def __init__(self, batches: int = 0) -> None:
        super().__init__()
        self.batches, self.third = batches, False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.third = epoch == 2
        if self.third and not self.batches:
            raise KeyboardInterrupt

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.third and batch + 1 == self.batches:
            raise KeyboardInterrupt


def backed_up(folder: Path, callbacks: Any = (), **options: Any) -> dict[str, Any]:
    """Train for four epochs with Keras' callback, or go on with them."""
    made = model(run_eagerly=True)
    backup = tf.keras.callbacks.BackupAndRestore(folder, **{"delete_checkpoint": False, **options})
    with contextlib.suppress(KeyboardInterrupt):
        batches = data(0, collectives.world().size)
        made.fit(batches, epochs=4, verbose=0, callbacks=[backup, *callbacks])
    return state(made)


def written_by_one(folder: Path) -> dict[str, Any]:
    """What `keras_saves` reads: a model that one rank has trained, in all forms that Keras has."""
    made = model(run_eagerly=True)
    made.fit(data(0, 1), verbose=0)
    made.save_weights(folder / "tensorflow")
    made.save_weights(folder / "keras.weights.h5")
    tf.train.Checkpoint(model=made, optimizer=made.optimizer).write(str(folder / "object"))
    backed_up(folder / "of one", [Killed()])
    return state(made)


def keras_saves(folder: Path) -> dict[str, Any]:
    """Keras' and TensorFlow's ways to save and load, on several ranks."""
    here = collectives.world()
    found = {"whole": backed_up(folder / "whole")}
    backed_up(folder / "killed", [Killed()])
    if here.rank == 0:
        shutil.copytree(folder / "killed", folder / "killed for others")
    found["resumed"] = backed_up(folder / "killed")
    found["of one"] = backed_up(folder / "of one")
    backed_up(folder / "within", [Killed(2)], save_freq=1)
    if here.rank == 0:
        shutil.copytree(folder / "within", folder / "within for others")
    with pytest.warns(UserWarning, match=r"after 2 steps of epoch 3, and Keras .* the first batches of"):
        found["within"] = backed_up(folder / "within", save_freq=1, delete_checkpoint=True)
    found["left"] = sorted(each.name for each in (folder / "within").iterdir())

    loaded = {}
    for name in ("tensorflow", "keras.weights.h5", "object"):
        made = model()
        made.optimizer.build(made.trainable_variables)
        if name == "object":
            tf.train.Checkpoint(model=made, optimizer=made.optimizer).read(str(folder / name))
        else:
            made.load_weights(folder / name)
        loaded[name] = state(made)
    found["loaded"] = loaded

    checkpoint = tf.train.Checkpoint(model=made)
    saves = {
        "save": lambda: checkpoint.save(str(folder / "refused")),
        "write": lambda: checkpoint.write(str(folder / "refused")),
        "manager": tf.train.CheckpointManager(checkpoint, folder / "manager", 1).save,
        "weights": lambda: made.save_weights(folder / "refused"),
        "h5": lambda: made.save_weights(folder / "refused.weights.h5"),
        "keras": lambda: made.save(folder / "refused.keras"),
        "callback": lambda: made.fit(
            data(0, here.size), callbacks=[tf.keras.callbacks.ModelCheckpoint(str(folder / "refused"))]
        ),
        "layer": lambda: made.get_layer("tables").save_own_variables({}),
    }
    found["refused"] = {name: caught(save) for name, save in saves.items()}
    some = model()
    if here.rank == 0:
        some.load_weights(folder / "tensorflow")
    found["one alone"] = caught(lambda: some.fit(data(0, here.size), verbose=0))
    with tables_saved_elsewhere():
        checkpoint.write(str(folder / f"dense of {here.rank}"))
    return found


def assert_same_state(ranks: Any, expected: Any, *, exactly: bool = False) -> None:
    """All ranks' rows together, and each rank's dense weights, are those of `expected`'s ranks."""

    def rows(of: Any, name: str, field: str) -> Any:
        parts = [each["tables"][name] for each in of]
        keys = np.concatenate([part["keys"] for part in parts])
        return np.concatenate([part[field] for part in parts])[np.argsort(keys, kind="stable")]

    tolerance = {"rtol": 0, "atol": 0} if exactly else {"rtol": 1e-5, "atol": 1e-6}
    for name in expected[0]["tables"]:
        for field in ("keys", "rows", "slots", "frequency", "last_step"):
            mine, other = rows(ranks, name, field), rows(expected, name, field)
            np.testing.assert_allclose(mine, other, err_msg=f"{name} {field}", **tolerance)
    for each in ranks:
        for mine, other in zip(each["dense"], expected[0]["dense"], strict=True):
            np.testing.assert_allclose(mine, other, **tolerance)


@pytest.mark.shown_by("test_other_numbers_of_ranks_go_on_with_one_run_and_it_is_one_ranks")
def test_keras_saves_all_ranks_rows_or_refuses_and_any_number_of_ranks_goes_on(tmp_path: Path) -> None:
    expected = written_by_one(tmp_path)
    both = run_ranks(keras_saves, 2, tmp_path)
    whole = [rank["whole"] for rank in both]
    assert all(table["keys"].size for rank in whole for table in rank["tables"].values())
    assert_same_state(whole, [backed_up(tmp_path / "one's")])
    assert_same_state([rank["resumed"] for rank in both], whole, exactly=True)
    assert_same_state([rank["of one"] for rank in both], whole)  # two epochs on one rank, two on two
    assert_same_state([backed_up(tmp_path / "killed for others")], whole)  # the other way round
    with pytest.raises(ConfigError, match=r"by 2 ranks within epoch 3, .* continue with 2 ranks, or by "):
        backed_up(tmp_path / "within for others", save_freq=1)
    for rank in both:
        assert rank["left"] == []
        assert rank["one alone"].startswith("ConfigError: ranks disagree on the step of table")
        for name, said in rank["refused"].items():
            assert said.startswith("ConfigError: "), name
            assert "has only the rows that it owns" in said, name
            assert "BackupAndRestore or gmeta.checkpoint.ShardedCheckpoint, to which every" in said, name
    for name in both[0]["loaded"]:
        loaded = [rank["loaded"][name] for rank in both]
        for each in loaded:  # a weights file has no optimizer
            each["dense"] = each["dense"] if name == "object" else each["dense"][:2]
        of_one = expected if name == "object" else {**expected, "dense": expected["dense"][:2]}
        assert_same_state(loaded, [of_one], exactly=True)
    assert not list(tmp_path.glob("refused*"))


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
