"""Messages of keys put together on a device, against the native ops that do it in host memory."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gmeta.ops.exchange import gpu_keys, key_messages

KEYS = st.lists(st.one_of(st.integers(0, 9), st.integers(-(2**63), 2**63 - 1)), max_size=30)
PLACES = ["cpu", *(["gpu"] if tf.config.list_physical_devices("GPU") else [])]


def gathered(vectors, places):
    return [tf.gather(vector, at).numpy().tolist() for vector, at in zip(vectors, places, strict=True)]


@pytest.mark.parametrize("device", PLACES)
@given(
    of_ranks=st.integers(1, 3).flatmap(
        lambda tables: st.lists(st.lists(KEYS, min_size=tables, max_size=tables), min_size=1, max_size=4)
    )
)
def test_keys_reach_their_owners_as_by_the_native_ops(device, of_ranks):
    ranks, tables = len(of_ranks), len(of_ranks[0])
    routed, native = [], []
    for rank, batches in enumerate(of_ranks):
        batches = [tf.constant(batch, tf.int64) for batch in batches]
        note = tf.constant([rank, -7], tf.int64)
        routed.append(gpu_keys.route(batches, note=note, world_size=ranks, device=device))
        native.append(key_messages.route_keys(batches, note=note, world_size=ranks))
        assert gathered(routed[-1].keys, routed[-1].inverse) == [batch.numpy().tolist() for batch in batches]
        # Few keys have one order in both.
        for mine, other in zip(tf.nest.flatten(routed[-1]), tf.nest.flatten(native[-1]), strict=True):
            np.testing.assert_array_equal(mine, other)
    pieces = [tf.split(each.message, each.splits) for each in routed]
    for owner in range(ranks):
        message = tf.concat([of_sender[owner] for of_sender in pieces], axis=0)
        splits = tf.stack([each.splits[owner] for each in routed])
        mine = gpu_keys.receive(message, splits, tables=tables, note_size=2, device=device)
        other = key_messages.receive_keys(message, splits, tables=tables, note_size=2)
        for name in ("wire_keys", "counts", "notes"):
            for one, two in zip(
                tf.nest.flatten(getattr(mine, name)), tf.nest.flatten(getattr(other, name)), strict=True
            ):
                np.testing.assert_array_equal(one, two)
        assert gathered(mine.keys, mine.positions) == [wire.numpy().tolist() for wire in mine.wire_keys]
        assert [len(set(keys.numpy())) for keys in mine.keys] == [len(keys) for keys in mine.keys]


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
