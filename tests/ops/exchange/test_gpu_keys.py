"""Messages of keys put together on a device, against the native ops that do it in host memory."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gmeta.ops import key_messages, row_buffers
from gmeta.ops import key_messages as gpu_keys

KEYS = st.lists(st.one_of(st.integers(0, 9), st.integers(-(2**63), 2**63 - 1)), max_size=30)
PLACES = ["cpu", *(["gpu"] if tf.config.list_physical_devices("GPU") else [])]


def gathered(vectors, places):
    return [tf.gather(vector, at).numpy().tolist() for vector, at in zip(vectors, places, strict=True)]


@pytest.mark.parametrize("device", PLACES)
@given(
    of_ranks=st.integers(1, 3).flatmap(
        lambda tables: st.lists(st.lists(KEYS, min_size=tables, max_size=tables), min_size=1, max_size=4)
    ),
    dedup=st.booleans(),
)
def test_keys_reach_their_owners_as_by_the_native_ops(device, of_ranks, dedup):
    ranks, tables = len(of_ranks), len(of_ranks[0])
    routed, native = [], []
    for rank, batches in enumerate(of_ranks):
        batches = [tf.constant(batch, tf.int64) for batch in batches]
        note = tf.constant([rank, -7], tf.int64)
        settings = {"note": note, "world_size": ranks, "dedup": dedup}
        routed.append(gpu_keys.route(batches, **settings, device=device))
        native.append(key_messages.route_keys(batches, **settings))
        assert gathered(routed[-1].keys, routed[-1].inverse) == [batch.numpy().tolist() for batch in batches]
        # Few keys have one order in both, and so have all keys that aren't deduplicated.
        for mine, other in zip(tf.nest.flatten(routed[-1]), tf.nest.flatten(native[-1]), strict=True):
            np.testing.assert_array_equal(mine, other)
    pieces = [tf.split(each.message, each.splits) for each in routed]
    for owner in range(ranks):
        message = tf.concat([of_sender[owner] for of_sender in pieces], axis=0)
        splits = tf.stack([each.splits[owner] for each in routed])
        settings = {"tables": tables, "note_size": 2, "dedup": dedup}
        mine = gpu_keys.receive(message, splits, **settings, device=device)
        other = key_messages.receive_keys(message, splits, **settings)
        for name in ("wire_keys", "counts", "notes", *(() if dedup else ("keys", "positions"))):
            for one, two in zip(
                tf.nest.flatten(getattr(mine, name)), tf.nest.flatten(getattr(other, name)), strict=True
            ):
                np.testing.assert_array_equal(one, two)
        assert gathered(mine.keys, mine.positions) == [wire.numpy().tolist() for wire in mine.wire_keys]
        if dedup:
            assert [len(set(keys.numpy())) for keys in mine.keys] == [len(keys) for keys in mine.keys]


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("world_size", [1, 5, 1024])
def test_many_keys_travel_as_often_as_they_occur(device, world_size):
    batches = [np.random.default_rng(seed).zipf(1.2, 50_000 + seed) for seed in range(2)]
    settings = {"note": tf.constant([3], tf.int64), "world_size": world_size, "dedup": False}
    mine = gpu_keys.route([tf.constant(batch) for batch in batches], **settings, device=device)
    other = key_messages.route_keys(batches, **settings)
    for one, two in zip(tf.nest.flatten(mine), tf.nest.flatten(other), strict=True):
        np.testing.assert_array_equal(one, two)
    for keys in mine.keys:
        assert "GPU" in keys.device or device == "cpu"


@pytest.mark.parametrize("dim", [64, 200, 512])
@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("dedup", [True, False])
def test_rows_come_back_to_their_keys_at_any_width(device, dim, dedup):
    keys = tf.constant(np.random.default_rng(dim).zipf(1.3, 3000))
    routed = gpu_keys.route([keys], note=tf.zeros([0], tf.int64), world_size=1, dedup=dedup, device=device)
    owned = gpu_keys.receive(routed.message, routed.splits, tables=1, dedup=dedup, device=device)

    def rows_of(keys):  # of whole numbers, which a row of any width repeats
        return tf.tile(tf.cast(keys % 251, tf.float32)[:, tf.newaxis], [1, dim])

    packed = row_buffers.pack([rows_of(owned.keys[0])], owned.positions, owned.counts)
    assert packed.buffer.shape == [(len(set(keys.numpy())) if dedup else 3000) * dim]
    (rows,) = row_buffers.unpack(packed.buffer, routed.counts, dims=[dim])
    np.testing.assert_array_equal(tf.gather(rows, routed.inverse[0]), rows_of(keys))


@pytest.mark.parametrize("device", PLACES)
def test_many_keys_are_by_owner_and_in_the_order_of_their_first_appearance(device):
    ids = np.random.default_rng(1).zipf(1.2, 100_000)
    routed = gpu_keys.route([tf.constant(ids)], note=tf.zeros([0], tf.int64), world_size=5, device=device)
    native = key_messages.route_keys([ids], world_size=5)
    np.testing.assert_array_equal(routed.counts, native.counts)
    first = {key: place for place, key in reversed(list(enumerate(ids.tolist())))}
    for mine, other in zip(
        np.split(routed.keys[0], np.cumsum(routed.counts)[:-1]),
        np.split(native.keys[0], np.cumsum(native.counts)[:-1]),
        strict=True,
    ):
        assert mine.tolist() == sorted(other.tolist(), key=first.__getitem__)


UNKNOWN = [tf.TensorSpec([None], tf.int64), tf.TensorSpec([1], tf.int32)]


@pytest.mark.parametrize(
    "function", [lambda call: call, tf.function(input_signature=UNKNOWN)], ids=["eager", "graph"]
)
def test_a_message_of_other_tables_is_refused(function):
    routed = gpu_keys.route(
        [tf.constant([1, 2], tf.int64)], note=tf.constant([5], tf.int64), world_size=1, device="cpu"
    )

    @function
    def receive(message, splits):
        return gpu_keys.receive(message, splits, tables=2, note_size=1, device="cpu")

    with pytest.raises(tf.errors.InvalidArgumentError, match="one of 2 tables and a note of 1 numbers"):
        receive(routed.message, routed.splits)
