from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.core.shares import owned_shards
from gmeta.ops import key_messages, row_buffers
from support.reference import messages as expected
from support.reference import table as reference

INT64 = np.iinfo(np.int64)
# Few values, so that ranks and positions share them; both ends; and any.
KEY = st.one_of(
    st.integers(-4, 4), st.sampled_from([INT64.min, INT64.max]), st.integers(INT64.min, INT64.max)
)
BATCH = st.lists(KEY, max_size=12).map(lambda keys: np.array(keys, np.int64))
TABLES = st.lists(BATCH, min_size=1, max_size=4)
WORLD = st.sampled_from([1, 2, 3, 4, 7, 64, 1024])
NOTE = st.lists(KEY, max_size=3).map(lambda note: np.array(note, np.int64))


def assert_equal(actual, wanted):
    """Of handles: every tensor, dtypes included."""
    actual, wanted = tf.nest.flatten(actual), tf.nest.flatten(wanted)
    assert len(actual) == len(wanted)
    for a, w in zip(actual, wanted, strict=True):
        assert a.dtype.as_numpy_dtype == w.dtype
        np.testing.assert_array_equal(a, w)


def keys_of_one_owner(owner, world_size, count, random):
    keys = random.integers(INT64.min, INT64.max, 40 * world_size * count)
    return keys[expected.owners(keys, world_size) == owner][:count]


@given(keys=TABLES, note=NOTE, world_size=WORLD, dedup=st.booleans())
def test_routing_equals_its_reference(keys, note, world_size, dedup):
    settings = {"note": note, "world_size": world_size, "dedup": dedup}
    actual = key_messages.route_keys(keys, **settings)
    assert_equal(actual, expected.route_keys(keys, **settings))
    assert isinstance(actual.keys, tuple)
    assert isinstance(actual.inverse, tuple)


@pytest.mark.parametrize("dedup", [True, False])
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_large_batches_are_routed_as_small_ones(world_size, dedup):
    """Of several slices and parts, on all threads."""
    random = np.random.default_rng(world_size)
    keys = [random.zipf(1.2, n) * sign for n, sign in ((50_000, 1), (0, 1), (20_000, -1), (9_000, 7))]
    keys.append(keys_of_one_owner(world_size - 1, world_size, 10_000, random))
    note = np.array([len(keys[0])])
    settings = {"note": note, "world_size": world_size, "dedup": dedup}
    assert_equal(key_messages.route_keys(keys, **settings), expected.route_keys(keys, **settings))


def test_an_owner_is_the_rank_that_loads_the_key_s_logical_shard():
    keys = np.random.default_rng(0).integers(INT64.min, INT64.max, 3000)
    for world_size in (1, 3, 8):
        routed = key_messages.route_keys([keys], world_size=world_size)
        begin = 0
        for rank, count in enumerate(routed.counts[:, 0].numpy()):
            shards = reference.logical_shards(routed.keys[0][begin : begin + count])
            assert set(shards.tolist()) <= set(owned_shards(rank, world_size))
            begin += count
        assert begin == 3000


def received_messages(batches, note, world_size, dedup=True):
    """What one owner receives where rank r sends batches[r], and that owner."""
    owner = world_size - 1
    routed = [
        expected.route_keys(batch, note=note + rank, world_size=world_size, dedup=dedup)
        for rank, batch in enumerate(batches)
    ]
    ends = [np.cumsum(r.splits) for r in routed]
    parts = [r.message[e[owner] - r.splits[owner] : e[owner]] for r, e in zip(routed, ends, strict=True)]
    return np.concatenate(parts), np.array([part.size for part in parts], np.int32)


def assert_owned_as_in_reference(actual, wanted):
    """But for the order of the distinct keys, which is the op's own."""
    assert_equal(actual[2:], wanted[2:])
    for keys, positions, sent in zip(actual.keys, actual.positions, wanted.wire_keys, strict=True):
        assert positions.dtype == tf.int32
        np.testing.assert_array_equal(keys.numpy()[positions.numpy()], sent)
    assert [sorted(k.numpy().tolist()) for k in actual.keys] == [sorted(k.tolist()) for k in wanted.keys]


@given(data=st.data(), world_size=st.integers(1, 4), tables=st.integers(1, 3), note=NOTE, dedup=st.booleans())
def test_receiving_equals_its_reference(data, world_size, tables, note, dedup):
    batches = [[data.draw(BATCH) for _ in range(tables)] for _ in range(world_size)]
    message, splits = received_messages(batches, note, world_size)
    settings = {"tables": tables, "note_size": note.size, "dedup": dedup}
    actual = key_messages.receive_keys(message, splits, **settings)
    # Small batches aren't split, so their keys are in the order of first appearance, as the reference's.
    assert_equal(actual, expected.receive_keys(message, splits, **settings))


@pytest.mark.parametrize("dedup", [True, False])
def test_large_messages_are_received_as_small_ones(dedup):
    random = np.random.default_rng(2)
    batches = [[random.zipf(1.1, n) for n in (60_000, 0, 500)] for _ in range(2)]
    message, splits = received_messages(batches, np.array([5]), 2, dedup)
    settings = {"tables": 3, "note_size": 1, "dedup": dedup}
    actual = key_messages.receive_keys(message, splits, **settings)
    assert_owned_as_in_reference(actual, expected.receive_keys(message, splits, **settings))
    again = key_messages.receive_keys(message, splits, **settings)
    assert_equal(again, tf.nest.map_structure(lambda t: t.numpy(), actual))


@given(
    data=st.data(),
    world_size=st.integers(1, 4),
    dims=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    gathers=st.booleans(),
)
def test_rows_are_packed_as_in_the_reference_and_unpacked_again(data, world_size, dims, gathers):
    counts = np.array(
        [[data.draw(st.integers(0, 5)) for _ in dims] for _ in range(world_size)], np.int32
    ).reshape(world_size, len(dims))
    random = np.random.default_rng(data.draw(st.integers(0, 9)))
    wire_sizes = counts.sum(axis=0)
    sizes = [data.draw(st.integers(1, 6)) if gathers else n for n in wire_sizes]
    rows = [random.normal(size=(n, dim)).astype(np.float32) for n, dim in zip(sizes, dims, strict=True)]
    positions = None
    if gathers:
        positions = [
            random.integers(0, s, n).astype(np.int32) for s, n in zip(sizes, wire_sizes, strict=True)
        ]
    packed = row_buffers.pack_rows(rows, positions, counts)
    assert_equal(packed, expected.pack_rows(rows, positions, counts))
    unpacked = row_buffers.unpack_rows(packed.buffer, counts, dims=dims)
    assert_equal(unpacked, expected.unpack_rows(packed.buffer.numpy(), counts, dims=dims))
    wire = rows if positions is None else [r[p] for r, p in zip(rows, positions, strict=True)]
    assert_equal(unpacked, wire)


@pytest.mark.parametrize("gathers", [True, False])
def test_many_and_wide_rows_are_cut_into_pieces_that_fit_together(gathers):
    random = np.random.default_rng(1)
    dims, counts = [3, 64, 9001], np.array([[7000, 1000, 2], [0, 300, 0], [5001, 0, 3]], np.int32)
    wire_sizes = counts.sum(axis=0)
    rows = [random.normal(size=(n, dim)).astype(np.float32) for n, dim in zip(wire_sizes, dims, strict=True)]
    positions = [random.permutation(n).astype(np.int32) for n in wire_sizes] if gathers else None
    packed = row_buffers.pack_rows(rows, positions, counts)
    assert_equal(packed, expected.pack_rows(rows, positions, counts))
    wire = rows if positions is None else [r[p] for r, p in zip(rows, positions, strict=True)]
    assert_equal(row_buffers.unpack_rows(packed.buffer, counts, dims=dims), wire)


MAGNITUDES = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -0.0, 1e30, -3.4028234663852886e38, 65504.0, 65535.0, 2.0**-126, -1e-40, 1e-45]),
)
SMALLEST = float(np.finfo(np.float32).tiny)


@pytest.mark.parametrize(
    ("wire_dtype", "relative", "of_largest"),
    [(tf.float16, 2.0**-11, 2.0**-40), (tf.bfloat16, 2.0**-8, 0.0)],
    ids=["float16", "bfloat16"],
)
@given(data=st.data(), dims=st.lists(st.integers(1, 20), min_size=1, max_size=2))
def test_16_bits_on_the_wire_cost_no_more_than_the_format_s_rounding(
    wire_dtype, relative, of_largest, data, dims
):
    # A bfloat16's largest is 3.39e38; what is above it by more than half a unit is an infinity.
    most = np.float32(3.3e38) if wire_dtype == tf.bfloat16 else np.float32(np.inf)
    sizes = [data.draw(st.integers(1, 4)) for _ in dims]
    rows = [
        np.array(data.draw(st.lists(MAGNITUDES, min_size=n * d, max_size=n * d)), np.float32).reshape(n, d)
        for n, d in zip(sizes, dims, strict=True)
    ]
    rows = [np.clip(matrix, -most, most) for matrix in rows]
    if wire_dtype == tf.bfloat16:  # the conversion of NumPy's bfloat16 and this one differ below
        rows = [np.where(np.abs(matrix) < SMALLEST, np.float32(0), matrix) for matrix in rows]
    counts = np.array([[n - 1 for n in sizes], [1 for _ in sizes]], np.int32)
    packed = row_buffers.pack_rows(rows, None, counts, wire_dtype=wire_dtype)
    assert_equal(packed, expected.pack_rows(rows, None, counts, wire_dtype=wire_dtype.as_numpy_dtype))
    widths = np.array(dims) + (wire_dtype == tf.float16)
    assert packed.splits.numpy().tolist() == (counts * widths).sum(axis=1).tolist()
    unpacked = row_buffers.unpack_rows(packed.buffer, counts, dims=dims)
    assert_equal(unpacked, expected.unpack_rows(packed.buffer.numpy(), counts, dims=dims))
    for found, matrix in zip(unpacked, rows, strict=True):
        exact = matrix.astype(np.float64)
        error = np.abs(found.numpy().astype(np.float64) - exact)
        bound = np.maximum(np.abs(exact) * relative, np.abs(exact).max(axis=1, keepdims=True) * of_largest)
        # What is subnormal, or becomes so by rounding, may become zero.
        assert ((error <= bound) | (np.abs(exact) <= SMALLEST * (1 + relative))).all()


@given(values=st.lists(MAGNITUDES, max_size=6), bad=st.sampled_from([np.inf, -np.inf, np.nan]))
def test_infinities_and_nans_arrive_and_leave_the_rest_as_it_is(values, bad):
    finite = np.array([[*values, 0.0]], np.float32)
    row = np.concatenate([finite, np.array([[bad]], np.float32)], axis=1)
    for wire_dtype in (tf.float32, tf.float16, tf.bfloat16):
        found, alone = (
            row_buffers.unpack_rows(
                row_buffers.pack_rows([rows], None, [[1]], wire_dtype=wire_dtype).buffer,
                [[1]],
                dims=[rows.shape[1]],
            )[0].numpy()
            for rows in (row, finite)
        )
        np.testing.assert_array_equal(found[0, -1], np.float32(bad))
        np.testing.assert_array_equal(found[:, :-1], alone)


@pytest.mark.parametrize("gathers", [True, False])
def test_float16_rows_of_all_magnitudes_keep_11_bits(gathers):
    """Gradients as they travel: sums over many samples beside those of a loss that is all but zero."""
    random = np.random.default_rng(3)
    dims, counts = [8, 300], np.array([[4000, 0], [1000, 90]], np.int32)
    sizes = counts.sum(axis=0)
    rows = [
        (random.uniform(1, 2, (n, dim)) * 10.0 ** random.integers(-36, 38, (n, 1))).astype(np.float32)
        for n, dim in zip(sizes, dims, strict=True)
    ]
    positions = [random.permutation(n).astype(np.int32) for n in sizes] if gathers else None
    packed = row_buffers.pack_rows(rows, positions, counts, wire_dtype=tf.float16)
    assert_equal(packed, expected.pack_rows(rows, positions, counts, wire_dtype=np.float16))
    wire = rows if positions is None else [r[p] for r, p in zip(rows, positions, strict=True)]
    found = row_buffers.unpack_rows(packed.buffer, counts, dims=dims)
    assert_equal(found, expected.unpack_rows(packed.buffer.numpy(), counts, dims=dims))
    for there, back in zip(wire, found, strict=True):
        np.testing.assert_allclose(back, there, rtol=2.0**-11)


def exchange(parts):
    """An all-to-all: what rank r receives of (values, splits) of all ranks."""
    cut = [np.split(np.asarray(values), np.cumsum(splits)[:-1]) for values, splits in parts]
    received = []
    for rank in range(len(parts)):
        mine = [of_sender[rank] for of_sender in cut]
        received.append((np.concatenate(mine), np.array([part.size for part in mine], np.int32)))
    return received


@given(data=st.data(), world_size=st.integers(1, 4))
def test_every_position_gets_its_row_and_every_owner_its_gradients(data, world_size):
    """The whole way, over ranks that exist only here."""
    dims = [2, 5]
    batches = [[data.draw(BATCH) for _ in dims] for _ in range(world_size)]

    def row_of(keys, dim):
        return np.outer(np.asarray(keys) % 1009, np.arange(1, dim + 1)).astype(np.float32)

    routed = [
        key_messages.route_keys(batch, note=[rank], world_size=world_size)
        for rank, batch in enumerate(batches)
    ]
    owned = [
        key_messages.receive_keys(message, splits, tables=2, note_size=1)
        for message, splits in exchange([(r.message, r.splits) for r in routed])
    ]
    values = []
    for o in owned:
        assert o.notes.numpy().ravel().tolist() == list(range(world_size))
        rows = [row_of(keys, dim) for keys, dim in zip(o.keys, dims, strict=True)]
        values.append(row_buffers.pack_rows(rows, o.positions, o.counts))
    for r, batch, (buffer, _) in zip(routed, batches, exchange(values), strict=True):
        found = row_buffers.unpack_rows(buffer, r.counts, dims=dims)
        for rows, inverse, keys, dim in zip(found, r.inverse, batch, dims, strict=True):
            np.testing.assert_array_equal(rows.numpy()[inverse.numpy()], row_of(keys, dim))

    gradients = []
    for r in routed:
        sums = [
            np.bincount(inverse, minlength=len(keys)).astype(np.float32)[:, None] * np.ones(dim, np.float32)
            for inverse, keys, dim in zip(r.inverse, r.keys, dims, strict=True)
        ]
        gradients.append(row_buffers.pack_rows(sums, None, r.counts))
    for table, dim in enumerate(dims):
        counted = {}
        for o, (buffer, _) in zip(owned, exchange(gradients), strict=True):
            rows = row_buffers.unpack_rows(buffer, o.counts, dims=dims)[table].numpy()
            assert rows.shape == (len(o.wire_keys[table]), dim)
            for key, row in zip(o.wire_keys[table].numpy().tolist(), rows, strict=True):
                counted[key] = counted.get(key, 0) + row[-1]
        every = np.concatenate([batch[table] for batch in batches])
        assert counted == dict(zip(*(a.tolist() for a in np.unique(every, return_counts=True)), strict=True))


def test_the_ops_stand_in_a_graph_with_the_shapes_that_are_known():
    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def route(keys):
        routed = key_messages.route_keys([keys, keys + 1], note=[1], world_size=4)
        assert routed.splits.shape == [4]
        assert routed.counts.shape == [4, 2]
        owned = key_messages.receive_keys(routed.message, routed.splits, tables=2, note_size=1)
        assert owned.counts.shape == [4, 2]
        assert owned.notes.shape == [4, 1]
        buffer = tf.zeros([tf.reduce_sum(owned.counts) * 3])
        rows = row_buffers.unpack_rows(buffer, owned.counts, dims=[3, 3])
        assert [r.shape.as_list() for r in rows] == [[None, 3], [None, 3]]
        return owned.keys

    first, second = route(tf.range(5, dtype=tf.int64))
    assert sorted(first.numpy()) == [0, 1, 2, 3, 4]
    assert sorted(second.numpy()) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("message", "splits", "said"),
    [
        (
            [9, 1, 5, 9],
            [3, 1],
            r"the message of rank 1 of 2 has 1 values, fewer than its note of 1 and .* 1 tables",
        ),
        (
            [9, 0, 9, 3, 5],
            [2, 3],
            r"rank 1 of 2 says that it has 3 keys of table 0 of 1, where 1 values are left",
        ),
        ([9, -1, 9, 0], [2, 2], r"rank 0 of 2 says that it has -1 keys"),
        ([9, 1, 5, 6, 9, 0], [4, 2], r"rank 0 of 2 has 1 values more than the keys of its 1 tables"),
        ([9, 0, 9, 0], [2, 4], r"rank 1 of 2 ends at value 6, but only 4 have come"),
        ([9, 0, 9, 0, 7], [2, 2], r"5 values have come, but the messages of the 2 ranks have 4"),
        ([9, 0], [-2, 2], r"rank 0 of 2 has -2 values"),
    ],
)
def test_a_malformed_message_names_its_sender(message, splits, said):
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=rf"receive_keys: {'' if said[0] == '5' else '.*'}{said}"
    ):
        key_messages.receive_keys(message, splits, tables=1, note_size=1)


@pytest.mark.parametrize(
    ("rows", "positions", "counts", "said"),
    [
        ([[[1.0]]], [[0, 1]], [[2]], r"position 1 of table 0 must lie in \[0, 1\), got 1"),
        ([[[1.0]]], [[-1]], [[1]], r"position 0 of table 0 must lie in \[0, 1\), got -1"),
        ([[[1.0]]], [[0, 0]], [[3]], r"counts of table 0 say 3 rows, but positions has 2"),
        ([[[1.0]]], None, [[2]], r"counts of table 0 say 2 rows, but rows has 1"),
        ([[[1.0]]], None, [[1, 0]], r"counts must have shape \[ranks,1\], got \[1,2\]"),
        ([[[1.0]]], None, [[-1], [2]], r"counts of rank 0, table 0 must be at least 0, got -1"),
        ([[1.0]], None, [[1]], r"rows of table 0 must have shape \[rows, width\], got \[1\]"),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows, positions, counts, said):
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"pack_rows: {said}"):
        row_buffers.pack_rows(rows, positions, counts)


def test_too_much_for_one_exchange_is_refused_before_it_is_made():
    many = np.zeros(40_000, np.int32)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="rows for rank 1 are 2400000000 numbers; at most"
    ):
        row_buffers.pack_rows([tf.zeros([1, 60_000])], [many], [[0], [40_000]])


def test_a_buffer_that_does_not_fit_is_refused():
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="counts and dims say 4 numbers, but the buffer has 3"
    ):
        row_buffers.unpack_rows([1.0, 2.0, 3.0], [[1], [1]], dims=[2])


def test_what_can_not_be_used_is_refused():
    with pytest.raises(ConfigError, match=r"world_size must lie in \[1, 1024\], got 1025"):
        key_messages.route_keys([[1]], world_size=1025)
    with pytest.raises(ConfigError, match="table 1: keys must be integers"):
        key_messages.route_keys([[1], [0.5]], world_size=2)
    with pytest.raises(ConfigError, match="note: keys must be a vector"):
        key_messages.route_keys([[1]], note=[[1]], world_size=2)
    for op in (
        lambda: key_messages.route_keys([], world_size=2),
        lambda: key_messages.receive_keys([], [], tables=0),
        lambda: row_buffers.pack_rows([], None, [[]]),
        lambda: row_buffers.unpack_rows([], [[]], dims=[]),
    ):
        with pytest.raises(ConfigError, match="at least one table"):
            op()
    with pytest.raises(
        ConfigError, match="wire_dtype must be one of float32, float16, bfloat16, got float64"
    ):
        row_buffers.pack_rows([[[1.0]]], None, [[1]], wire_dtype=tf.float64)
    with pytest.raises(ConfigError, match="rows of table 0 must be float32, got dtype int32"):
        row_buffers.pack_rows([tf.constant([[1]])], None, [[1]])
    with pytest.raises(ConfigError, match="1 tables of rows, but positions of 2"):
        row_buffers.pack_rows([[[1.0]]], [[0], [0]], [[1]])
    with pytest.raises(ConfigError, match="dims must be at least 1, got "):
        row_buffers.unpack_rows([1.0], [[1]], dims=[0])
    with pytest.raises(ConfigError, match="buffer must be one of"):
        row_buffers.unpack_rows([1], [[1]], dims=[1])
