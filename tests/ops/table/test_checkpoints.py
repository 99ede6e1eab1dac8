from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from gmeta import initializers, ops, optimizers, policies
from gmeta.core import collectives
from gmeta.core.errors import ConfigError
from gmeta.ops.distinct import unique_by_owner
from gmeta.policies.row_lifetimes import Admission, Always
from support.tables import assert_same_tables, sorted_records

pytestmark = pytest.mark.usefixtures("table_device")

KEYS = [-(2**63), -1, 0, 1, 2**63 - 1]
OPTIMIZERS = [optimizers.SGD(0.1), optimizers.Adagrad(0.1), optimizers.Adam(0.01)]


def trained(optimizer: optimizers.SparseOptimizer) -> ops.HashTable:
    table = ops.HashTable(4, optimizer, initializers.Normal(0, 1), seed=2, name="item")
    for i in range(3):
        lookup = table.lookup([*KEYS, i])
        table.apply_gradients(
            lookup.keys, tf.sin(tf.cast(lookup.keys, tf.float32))[:, None] * tf.ones([1, 4])
        )
    return table


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.kind)
def test_a_checkpoint_carries_whole_records_and_the_step(tmp_path: Path, optimizer):
    table = trained(optimizer)
    path = tf.train.Checkpoint(table=table).save(tmp_path / "model")
    other = ops.HashTable(4, optimizer, initializers.Zeros(), name="other")
    other.lookup([123456])  # what it held is replaced
    tf.train.Checkpoint(table=other).restore(path).assert_consumed()
    assert_same_tables(table, other)
    # The next update is the same too: slots and Adam's step came along.
    for each in (table, other):
        each.apply_gradients(KEYS, tf.ones([5, 4]))
    assert_same_tables(table, other)


def test_an_empty_table_is_saved_and_restored(tmp_path: Path):
    path = tf.train.Checkpoint(table=ops.HashTable(4, optimizers.SGD())).save(tmp_path / "model")
    table = ops.HashTable(4, optimizers.SGD())
    table.lookup([1, 2, 3])
    tf.train.Checkpoint(table=table).restore(path).assert_consumed()
    assert int(table.size()) == 0


def test_a_manager_restores_a_table_that_is_made_later(tmp_path: Path):
    table = trained(optimizers.Adam())
    module = tf.Module()
    module.table = table
    tf.train.CheckpointManager(tf.train.Checkpoint(module=module), tmp_path, max_to_keep=2).save()
    late = tf.Module()
    checkpoint = tf.train.Checkpoint(module=late)
    checkpoint.restore(tf.train.latest_checkpoint(tmp_path))
    late.table = ops.HashTable(4, optimizers.Adam(), name="late")
    assert_same_tables(late.table, table)


class Embedding(tf.keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.table = ops.HashTable(3, optimizers.SGD(), initializers.Normal(0, 1))
        self.head = tf.keras.layers.Dense(1)

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        lookup = self.table.lookup(ids)
        return self.head(tf.gather(lookup.rows, lookup.inverse))


def test_keras_tracks_a_table_and_saves_it_with_the_weights(tmp_path: Path):
    ids = tf.constant([[1], [2], [3]], tf.int64)
    model = tf.keras.Sequential([Embedding()])
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(ids, tf.ones([3, 1]), verbose=0)
    table = model.layers[0].table
    table.apply_gradients([1], tf.ones([1, 3]), learning_rate=5.0)
    model.save_weights(tmp_path / "weights")
    other = tf.keras.Sequential([Embedding()])
    other(ids)
    other.load_weights(tmp_path / "weights").assert_existing_objects_matched()
    assert_same_tables(other.layers[0].table, table)
    np.testing.assert_array_equal(other(ids), model(ids))


@pytest.mark.parametrize(
    ("dim", "optimizer"), [(5, optimizers.Adam()), (4, optimizers.Adagrad())], ids=["dim", "optimizer"]
)
def test_a_checkpoint_of_another_form_is_refused(tmp_path: Path, dim, optimizer):
    path = tf.train.Checkpoint(table=trained(optimizers.Adam())).save(tmp_path / "model")
    with pytest.raises(ConfigError, match=r'table .* is .*, but the checkpoint holds \{"dim": 4, .*"adam"\}'):
        tf.train.Checkpoint(table=ops.HashTable(dim, optimizer)).restore(path)


def divided(admission: Admission) -> ops.HashTable:
    table = ops.HashTable(2, optimizers.SGD(0.1), initializers.Normal(0, 1), admission=admission)
    table.divided = True
    return table


@pytest.mark.parametrize("bloom", [None, policies.Bloom(500)], ids=["exact", "filter"])
def test_ranks_restore_what_they_own_of_a_whole_table_and_save_none_of_it(tmp_path, monkeypatch, bloom):
    ids, admission = np.random.default_rng(0).integers(0, 300, 1000), policies.CountAdmission(4, bloom)
    table = divided(admission)
    for some in np.split(ids, 10):
        table.lookup(some)
    path, state = tf.train.Checkpoint(table=table).save(tmp_path / "whole"), table.export_admission()
    ranks, owners = [], unique_by_owner(np.arange(300), world_size=3).counts.numpy()
    for rank in range(3):
        monkeypatch.setattr(collectives.place, "_world", collectives.World(rank, 3, 0))
        own = divided(admission)
        tf.train.Checkpoint(table=own).restore(path).assert_consumed()
        ranks.append(own)
        with pytest.raises(ConfigError, match=f"rank {rank} of 3 has only the rows that it owns"):
            tf.train.Checkpoint(table=own).save(tmp_path / "part")
        # All three own an id's row and count: what they learn of the ids from here on is what one rank would.
        mine = np.flatnonzero(ops.distinct.owned_by(np.arange(300), rank, 3))
        assert len(mine) == owners[rank]
        own.lookup(mine)
    table.lookup(np.arange(300))
    records = [own.export() for own in ranks]
    order = np.argsort(np.concatenate([each.keys for each in records]))
    whole = sorted_records(table)
    for name in ("keys", "rows", "frequency"):
        found = np.concatenate([getattr(each, name) for each in records])[order]
        np.testing.assert_array_equal(found, whole[name])
    left = [own.export_admission() for own in ranks]
    assert sum(len(each.keys) for each in left) == len(table.export_admission().keys)
    if bloom is not None:
        assert np.any(state.filter)
        np.testing.assert_array_equal(
            np.max([each.filter for each in left], 0), table.export_admission().filter
        )


def test_ranks_refuse_a_file_that_may_have_one_ranks_rows(monkeypatch):
    table = divided(Always())
    tensors = table.saved_tensors()
    tensors["-layout"] = tf.constant('{"dim": 2, "optimizer": "sgd"}')  # as earlier versions wrote it
    table._restore_from_tensors(tensors)
    monkeypatch.setattr(collectives.place, "_world", collectives.World(0, 2, 0))
    with pytest.raises(ConfigError, match="an earlier version of gmeta saved the file"):
        table._restore_from_tensors(tensors)


def test_an_asynchronous_checkpoint_is_refused(tmp_path: Path):
    checkpoint = tf.train.Checkpoint(table=trained(optimizers.SGD(0.1)))
    with pytest.raises(ConfigError, match="would save its rows at a later step than the dense weights"):
        checkpoint.save(tmp_path / "model", options=tf.train.CheckpointOptions(enable_async=True))


def test_import_merges_or_replaces():
    source = trained(optimizers.SGD(0.1))
    table = ops.HashTable(4, optimizers.SGD(0.1), initializers.Zeros())
    table.lookup([1, 77])
    table.import_(source.export())
    assert int(table.size()) == int(source.size()) + 1
    assert int(table.step()) == 0
    np.testing.assert_array_equal(table.lookup_keys([1]), source.lookup_keys([1]))
    table.import_(source.export(), replace=True)
    assert_same_tables(table, source)
