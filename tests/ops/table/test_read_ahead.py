"""Rows that are read ahead: every number is that of a table which only looks up."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gmeta import initializers, optimizers, policies
from gmeta.core.errors import ConfigError
from gmeta.ops import HashTable
from gmeta.ops.table.portable_tables import portable_ops
from gmeta.ops.table.read_ahead import Peeked
from gmeta.ops.table.restored_rows import TableSnapshot
from gmeta.policies.row_lifetimes import Always
from support.tables import assert_same_tables

pytestmark = pytest.mark.usefixtures("table_device")

DIM = 3
ROW = 8 + 4 * DIM + 48  # a row of 3 weights under SGD, as a bound in bytes charges it
PRIOR = optimizers.RowPrior([0.5, 1.0, 2.0], samples=20)
KINDS = [
    *(optimizers.SGD, optimizers.Momentum, optimizers.Adagrad, optimizers.RowWiseAdagrad),
    *(optimizers.Adam, optimizers.AdamW, optimizers.Ftrl),
]
ADMISSIONS = [
    Always(),
    policies.CountAdmission(2),
    policies.CountAdmission(2, filter=policies.Bloom(200, error=0.01)),
    policies.ProbabilityAdmission(0.5),
]
EVICTIONS = [
    None,
    policies.LRU(max_rows=9),
    policies.LFU(max_bytes=20 * ROW),
    policies.TTL(steps=2),
    policies.MinNorm(threshold=0.9, every=2, max_rows=16),
]
PRECISIONS = [None, policies.TwoPrecisions(2), policies.TwoPrecisions(3, half_life=1)]

ACTIONS = (
    *("peek", "peek", "peek", "look up", "look up", "look up", "read", "update", "update", "update"),
    *("remove", "evict", "import", "replace", "take", "restore", "change"),
)


def train(table, keys):
    gradients = tf.sin(tf.cast(keys[:, None], tf.float32) * tf.range(1.0, 4.0))
    table.apply_gradients(keys, gradients, 0.1)


def import_some(table, keys, replace):
    records = table.export()
    kept = tf.constant([int(key) in keys for key in records.keys], tf.bool)
    columns = [tf.boolean_mask(column, kept) for column in records[:5]]
    columns[1] += 1.0  # other rows at the same steps
    table.import_(type(records)(*columns, records.step), replace=replace)


def statistics(table):
    """All counts but those of memory and of a drive."""
    memory = ("capacity", "load_factor", "bytes", "disk_rows", "disk_bytes", "brought", "spilled")
    return [int(count) for name, count in table.statistics()._asdict().items() if name not in memory]


@given(
    st.lists(st.sampled_from(ACTIONS), min_size=10, max_size=50),
    st.integers(0, 2**31),
    st.sampled_from(KINDS),
    st.booleans(),
    st.sampled_from(ADMISSIONS),
    st.sampled_from(EVICTIONS),
    st.sampled_from(PRECISIONS),
)
def test_peeking_early_and_rereading_is_looking_up(
    actions, seed, kind, prior, admission, eviction, precision
):
    rng = np.random.default_rng(seed)
    prior = PRIOR if prior else None
    rules = {"admission": admission, "eviction": eviction, "precision": precision}
    plain, ahead = (
        HashTable(DIM, kind(prior=prior), initializers.Uniform(-1.0, 1.0), **rules) for _ in range(2)
    )
    peeked, snapshots = [], []
    for action in actions:
        keys = tf.constant(rng.integers(0, 20, rng.integers(15)))
        if action == "peek":
            peeked.append((keys, ahead.peek(keys)))
        elif action in ("look up", "read"):
            if peeked:
                keys, rows = peeked.pop(rng.integers(len(peeked)))
                expected = plain.lookup_keys(keys, insert=action == "look up")
                found = ahead.reread(keys, rows, insert=action == "look up")
                np.testing.assert_array_equal(found.rows, expected)
                assert 0 <= int(found.changed) <= len(keys)
        elif action == "take":
            snapshots = [TableSnapshot(plain), TableSnapshot(ahead)]
        elif action == "restore":
            for snapshot in snapshots:
                snapshot.restore()
        elif action == "change":
            snapshots = []
            optimizer = KINDS[rng.integers(len(KINDS))](prior=prior)
            for table in (plain, ahead):
                table.change_optimizer(optimizer)
        else:
            for table in (plain, ahead):
                if action == "update":
                    train(table, keys)
                elif action == "remove":
                    table.remove(keys[:3])
                elif action == "evict":
                    table.evict()
                else:
                    import_some(table, keys.numpy(), action == "replace")
        assert statistics(plain) == statistics(ahead)
    assert_same_tables(plain, ahead)
    for one, other in zip(plain.export_admission(), ahead.export_admission(), strict=True):
        np.testing.assert_array_equal(np.sort(one), np.sort(other))


def new_table(**options):
    return HashTable(2, optimizers.SGD(1.0), initializers.Constant(5.0), name="item", **options)


def test_a_peek_changes_nothing_and_only_changed_rows_are_read_again():
    table = new_table()
    table.lookup([1, 2])
    before = statistics(table)
    peeked = table.peek([1, 2, 3])
    assert statistics(table) == before
    table.apply_gradients([2], tf.ones([1, 2]))
    rows, changed = table.reread([1, 2, 3], peeked)
    np.testing.assert_array_equal(rows[:, 0], [5, 4, 5])
    assert int(changed) == 1  # not 3, whose new row is the initial row that was peeked
    np.testing.assert_array_equal(peeked.rows, tf.fill([3, 2], 5.0))  # nobody writes into what one holds


def test_stamps_of_zero_read_everything():
    table = new_table()
    peeked = Peeked(tf.zeros([2, 2]), tf.zeros([2], tf.int64))
    rows, changed = table.reread([1, 2], peeked)
    np.testing.assert_array_equal(rows, tf.fill([2, 2], 5.0))
    assert int(changed) == 2


def test_shapes_that_do_not_fit_are_refused():
    table = new_table()
    peeked = table.peek([1, 2])
    with pytest.raises(
        ConfigError, match=r"table 'item': peeked rows must have shape \(3, 2\), got \(2, 2\)"
    ):
        table.reread([1, 2, 3], peeked)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"stamps must have shape \[2\], got \[1\]"):
        table.reread([1, 2], peeked._replace(stamps=peeked.stamps[:1]))
    with pytest.raises(ConfigError, match="keys must be a vector"):
        table.peek([[1]])


def test_an_exported_graph_reads_nothing_ahead():
    table = new_table()
    peeked = table.peek([1])
    with (
        portable_ops(),
        pytest.raises(ConfigError, match="table 'item': an exported graph can't read rows ahead"),
    ):
        table.peek([1])
    with portable_ops(), pytest.raises(ConfigError, match="call lookup with insert=False there"):
        table.reread([1], peeked, insert=False)


@pytest.mark.parametrize("in_loop", [False, True])
def test_in_a_function_a_peek_waits_for_no_op_before_it_and_holds_none_after_it(in_loop):
    table = new_table()
    table.lookup([1, 2])
    has_peeked = threading.Event()

    def wait(gradients):
        return gradients * np.float32(has_peeked.wait(20))

    def tell(rows):
        has_peeked.set()
        return rows

    def step(gradients):
        waits = tf.numpy_function(wait, [gradients], tf.float32, stateful=False)
        table.apply_gradients([1], waits)  # ends only when the peek, which is called later, has ended
        peeked = table.peek([1, 2])
        table.apply_gradients([2], tf.ones([1, 2]))
        told = tf.numpy_function(tell, [peeked.rows], tf.float32, stateful=False)
        rows, _ = table.reread([1, 2], peeked)
        return tf.ensure_shape(told, [2, 2]), rows

    @tf.function
    def run(gradients):
        told = rows = tf.zeros([2, 2])
        for _ in tf.range(1) if in_loop else range(1):
            told, rows = step(gradients)
        return told, rows

    told, rows = run(tf.ones([1, 2]))
    assert told[0, 0] == 5
    np.testing.assert_array_equal(rows, [[4, 4], [4, 4]])


def test_a_peek_of_constant_keys_is_made_in_every_step():
    table = new_table()

    @tf.function
    def step():
        table.apply_gradients([1], tf.ones([1, 2]))
        with tf.control_dependencies([table.lookup_keys([1])]):
            return table.peek([1]).rows

    assert [float(step()[0, 0]) for _ in range(3)] == [5.0, 4.0, 3.0]  # the first update finds no row


def test_a_pipeline_of_functions_gives_the_numbers_of_lookups():
    rng = np.random.default_rng(0)
    batches = tf.constant(rng.integers(0, 40, [30, 10]))
    plain, ahead = (HashTable(4, optimizers.Adam(0.1), eviction=policies.LRU(max_rows=30)) for _ in range(2))

    @tf.function(reduce_retracing=True)
    def step(keys, peeked, following):
        following_peeked = ahead.peek(following)
        rows = ahead.reread(keys, peeked).rows
        ahead.apply_gradients(keys, tf.sin(rows))
        return rows, following_peeked

    peeked = ahead.peek(batches[0])
    for number, keys in enumerate(batches):
        rows, peeked = step(keys, peeked, batches[min(number + 1, 29)])
        expected = plain.lookup_keys(keys)
        plain.apply_gradients(keys, tf.sin(expected))
        np.testing.assert_array_equal(rows, expected)
    assert_same_tables(plain, ahead)


def test_threads_that_update_never_leave_a_row_that_is_too_old():
    keys = tf.range(8, dtype=tf.int64)
    table = HashTable(1, optimizers.SGD(1.0), initializers.Zeros())
    table.lookup(keys)
    ended, stop = np.zeros(8, np.int64), threading.Event()

    @tf.function
    def reread(peeked):
        return table.reread(keys, peeked).rows

    def update():
        for number in range(300):
            table.apply_gradients(keys[number % 8 : number % 8 + 1], -tf.ones([1, 1]))
            ended[number % 8] += 1
        stop.set()

    thread = threading.Thread(target=update)
    thread.start()
    while not stop.is_set():
        peeked = table.peek(keys)
        before = ended.sum()
        while ended.sum() == before and not stop.is_set():
            time.sleep(0)
        least = ended.copy()
        rows = reread(peeked)[:, 0].numpy()
        assert (rows >= least).all()
    thread.join()
    np.testing.assert_array_equal(table.reread(keys, table.peek(keys)).rows[:, 0], ended)
