"""HSTU's attention in each of its forms, against the equations in NumPy."""

import functools
import warnings

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.grappler import tf_optimizer
from tensorflow.python.training import saver

from gmeta import testing as reference
from gmeta.core.errors import ConfigError
from gmeta.ops import AttentionMask, RelativeBias, hstu_attention
from gmeta.ops import device as attention_device
from gmeta.ops import jagged_attention as module
from gmeta.ops.attention_inputs import bucket_starts, time_bucket
from gmeta.ops.jagged_attention import bias_attention, padded_attention
from gmeta.ops.table.portable_tables import portable_ops

MASKS = [
    AttentionMask(),
    AttentionMask(causal=False),
    AttentionMask(window=3, full_tail=1),
    AttentionMask(contexts_see="history"),
]
SCALE = 1 / 50


def drawn(seed, sequences, heads, d, dv, mask, positions=None, with_times=False):
    """Inputs, in float64, and the masks' matrices."""
    random = np.random.default_rng(seed)
    contexts, history, targets = np.array(sequences, int).reshape(-1, 3).T
    lengths = contexts + history + targets
    offsets = np.cumsum([0, *lengths])
    q, k, v, upstream = (random.normal(size=(offsets[-1], heads, w)) for w in (d, d, dv, dv))
    bias = None
    if positions or with_times:
        times = random.integers(0, 2**34, (2, offsets[-1]))
        bias = RelativeBias(
            random.normal(size=2 * positions - 1) if positions else None,
            *((random.normal(size=129), *times) if with_times else (None, None, None)),
        )
    visible = mask.visible(offsets, contexts, targets)
    matrices = [
        reference.sees(mask, length, c, t) for length, c, t in zip(lengths, contexts, targets, strict=True)
    ]
    return (q, k, v), upstream, offsets, visible, matrices, bias


def run(attention, arrays, upstream, offsets, visible, bias, dtype, form="silu"):
    """Outputs, and gradients of q, k, v and the tables."""
    q, k, v = (tf.constant(each, dtype) for each in arrays)
    tables = () if bias is None else tuple(None if t is None else tf.constant(t, dtype) for t in bias[:2])
    given_ = None if bias is None else RelativeBias(*tables, *bias[2:])
    watched = [each for each in (q, k, v, *tables) if each is not None]
    with tf.GradientTape() as tape:
        tape.watch(watched)
        settings_ = {"scale": SCALE, "alpha": 0.4, "bias": given_, "form": form}
        out = attention(q, k, v, tf.constant(offsets, tf.int64), visible, **settings_)
    gradients = tape.gradient(out, watched, tf.constant(upstream, dtype))
    return [out, *map(tf.convert_to_tensor, gradients)]


def expected(arrays, upstream, offsets, matrices, bias, form="silu"):
    out = reference.hstu_attention(*arrays, offsets, matrices, SCALE, 0.4, bias, form)
    gradients = reference.hstu_gradients(*arrays, offsets, matrices, upstream, SCALE, 0.4, bias, form)
    tables = (None, None) if bias is None else bias[:2]
    kept = [g for g, table in zip(gradients[3:], tables, strict=True) if table is not None]
    return [out, *gradients[:3], *kept]


SEQUENCES = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(0, 3)), min_size=1, max_size=3
)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    sequences=SEQUENCES,
    heads=st.integers(1, 3),
    d=st.sampled_from([1, 4, 9]),
    dv=st.sampled_from([1, 5, 8]),
    mask=st.sampled_from(MASKS),
    positions=st.sampled_from([None, 4, 40]),
    with_times=st.booleans(),
    form=st.sampled_from(["silu", "softmax"]),
)
def test_outputs_and_gradients_are_those_of_the_equations(
    seed, sequences, heads, d, dv, mask, positions, with_times, form
):
    arrays, upstream, offsets, visible, matrices, bias = drawn(
        seed, sequences, heads, d, dv, mask, positions, with_times
    )
    wanted = expected(arrays, upstream, offsets, matrices, bias, form)
    exact = run(hstu_attention, arrays, upstream, offsets, visible, bias, tf.float64, form)
    naive = run(padded_attention, arrays, upstream, offsets, visible, bias, tf.float32, form)
    ours = run(hstu_attention, arrays, upstream, offsets, visible, bias, tf.float32, form)
    for want, double, plain, found in zip(wanted, exact, naive, ours, strict=True):
        np.testing.assert_allclose(double, want, rtol=1e-10, atol=1e-12)
        if want.size:
            # At most twice the error of the naive form, where that isn't smaller than any form's rounding.
            floor = 4 * np.finfo(np.float32).eps * np.abs(want).max()
            assert np.abs(found - want).max() <= max(2 * np.abs(plain - want).max(), floor)


@settings(max_examples=2, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    sequences=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(0, 3)), max_size=3),
    mask=st.sampled_from(MASKS),
    positions=st.sampled_from([None, 4]),
    with_times=st.booleans(),
    pairs=st.sampled_from([1, 50, 300, 10**6]),
    form=st.sampled_from(["silu", "softmax"]),
)
def test_the_plain_form_in_blocks_is_the_plain_form(
    seed, sequences, mask, positions, with_times, pairs, form
):
    arrays, upstream, offsets, visible, _, bias = drawn(seed, sequences, 2, 3, 4, mask, positions, with_times)
    blocks = functools.partial(padded_attention, pairs=pairs)
    for attention in (blocks, tf.function(blocks, autograph=False)):
        found = run(attention, arrays, upstream, offsets, visible, bias, tf.float64, form)
        wanted = run(padded_attention, arrays, upstream, offsets, visible, bias, tf.float64, form)
        for got, want in zip(found, wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"form": "relu"}, "form must be one of silu, softmax, got 'relu'"),
        ({"form": "softmax", "alpha": -0.5}, "takes an alpha of at least 0, got -0.5: negate q instead"),
    ],
)
def test_what_softmax_does_not_take_is_refused(settings_, words):
    arrays, _, offsets, visible, _, _ = drawn(1, [(0, 4, 0)], 1, 4, 4, AttentionMask())
    q, k, v = map(tf.constant, arrays)
    with pytest.raises(ConfigError, match=words):
        hstu_attention(q, k, v, tf.constant(offsets), visible, scale=1, **settings_)


@pytest.mark.parametrize(("farthest", "size"), [(80, 1.0), (None, 300.0)])
def test_softmax_takes_biases_of_minus_infinity_and_large_scores(farthest, size):
    """Blocks of columns in which a row has no weight, and scores that differ by more than exp can hold."""
    arrays, upstream, offsets, visible, _, _ = drawn(4, [(0, 200, 0), (0, 70, 0)], 1, 4, 4, AttentionMask())
    arrays = (size * arrays[0], *arrays[1:])
    bias = None
    if farthest is not None:
        distances = np.arange(-199, 200)
        bias = RelativeBias(positions=np.where(np.abs(distances) > farthest, -np.inf, 0.1))
    wanted = run(hstu_attention, arrays, upstream, offsets, visible, bias, tf.float64, "softmax")
    found = run(hstu_attention, arrays, upstream, offsets, visible, bias, tf.float32, "softmax")
    for got, want in zip(found, wanted, strict=True):
        assert np.isfinite(want).all()
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-3 * np.abs(want).max())


@pytest.mark.parametrize("positions", [None, 6])
def test_attention_by_the_bias_alone(positions):
    (_, _, v), upstream, offsets, visible, matrices, bias = drawn(
        3, [(1, 9, 2), (0, 0, 0), (0, 4, 0)], 2, 1, 5, AttentionMask(), positions, with_times=True
    )
    want = reference.bias_attention(v, offsets, matrices, SCALE, bias)
    out = bias_attention(tf.constant(v), tf.constant(offsets), visible, scale=SCALE, bias=bias)
    np.testing.assert_allclose(out, want, rtol=1e-10)
    buckets = tf.constant(bias.time_buckets)
    with tf.GradientTape() as tape:
        tape.watch(buckets)
        given_ = bias._replace(time_buckets=buckets)
        out = bias_attention(tf.constant(v), tf.constant(offsets), visible, scale=SCALE, bias=given_)
        total = tf.reduce_sum(out * upstream)
    found = tf.convert_to_tensor(tape.gradient(total, buckets))
    step = np.zeros(129)
    step[int(np.abs(found).argmax())] = 1e-3  # the form is linear in the table: differences are exact
    moved = reference.bias_attention(
        v, offsets, matrices, SCALE, bias._replace(time_buckets=bias.time_buckets + step)
    )
    np.testing.assert_allclose(np.sum(found * step), np.sum((moved - want) * upstream), rtol=1e-9)


@pytest.mark.parametrize("form", ["silu", "softmax"])
@pytest.mark.parametrize("positions", [None, 6])
def test_second_gradients_are_those_of_the_plain_form(positions, form):
    arrays, upstream, offsets, visible, _, bias = drawn(
        2, [(1, 5, 1), (0, 3, 0)], 2, 4, 3, AttentionMask(), positions, with_times=positions is not None
    )

    def curvature(attention):
        q, k, v, of_out = (tf.constant(each, tf.float32) for each in (*arrays, upstream))
        tables = [] if bias is None else [tf.constant(table, tf.float32) for table in bias[:2]]
        given_ = RelativeBias(*tables, *bias[2:]) if bias else None
        watched = [q, k, v, of_out, *tables]
        with tf.GradientTape() as outer:
            outer.watch(watched)
            with tf.GradientTape() as inner:
                inner.watch(watched)
                out = attention(q, k, v, tf.constant(offsets), visible, scale=SCALE, bias=given_, form=form)
            first = inner.gradient(out, [q, k, v, *tables], of_out)
            total = tf.add_n([tf.reduce_sum(tf.convert_to_tensor(each) ** 2) for each in first])
        return [tf.convert_to_tensor(each) for each in outer.gradient(total, watched)]

    for ours, plain in zip(curvature(hstu_attention), curvature(padded_attention), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5 * np.abs(plain).max())


@pytest.mark.parametrize("form", ["silu", "softmax"])
def test_a_sequence_does_not_depend_on_its_neighbours(form):
    arrays, upstream, offsets, visible, _, bias = drawn(
        1, [(1, 6, 2), (0, 20, 0)], 2, 8, 8, AttentionMask(), 30, with_times=True
    )
    one = offsets[1]
    for each in arrays:
        each[one:] = np.nan
    both = run(hstu_attention, arrays, upstream, offsets, visible, bias, tf.float32, form)
    alone = run(
        hstu_attention,
        [each[:one] for each in arrays],
        upstream[:one],
        offsets[:2],
        visible[:one],
        RelativeBias(bias[0], bias[1], bias[2][:one], bias[3][:one]),
        tf.float32,
        form,
    )
    for ours, other in zip(both[:4], alone[:4], strict=True):
        np.testing.assert_allclose(ours[:one], other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("away", [-1, 0, 1])
def test_buckets_are_those_of_the_logarithm(away):
    differences = bucket_starts()[:100] + away
    logarithms = np.floor(np.log(np.maximum(differences, 1).astype(np.longdouble)) / np.longdouble("0.301"))
    np.testing.assert_array_equal(time_bucket(tf.constant(differences)), np.minimum(logarithms, 128))
    np.testing.assert_array_equal(
        time_bucket(tf.constant(-differences)), time_bucket(tf.constant(differences))
    )
    assert time_bucket(tf.constant([2**62])).numpy() == [128]


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16], ids=lambda dtype: dtype.name)
def test_half_precision_is_float32_rounded(dtype):
    offsets = tf.constant([0, 3, 3, 10], tf.int64)
    visible = AttentionMask().visible(offsets)
    with tf.device("CPU:0"):
        q, k, v = (tf.cast(tf.random.stateless_normal([10, 2, 5], [seed, 0]), dtype) for seed in range(3))
        exact = [tf.cast(x, tf.float32) for x in (q, k, v)]
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([q, k, v, *exact])
            found = hstu_attention(q, k, v, offsets, visible, scale=0.1)
            expected = hstu_attention(*exact, offsets, visible, scale=0.1)
        gradients = tape.gradient(found, [q, k, v]), tape.gradient(expected, exact)
    for one, other in zip([found, *gradients[0]], [expected, *gradients[1]], strict=True):
        np.testing.assert_array_equal(tf.cast(one, tf.float32), tf.cast(tf.cast(other, dtype), tf.float32))


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float32, tf.float64], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("table", [tf.bfloat16, tf.float32, tf.float64], ids=lambda dtype: dtype.name)
def test_tables_may_be_of_another_dtype(table, dtype):
    sequences = [(0, 5, 0), (1, 30, 2)]
    arrays, _, offsets, visible, matrices, bias = drawn(3, sequences, 2, 8, 8, MASKS[0], 20, with_times=True)
    arrays = [np.array(tf.cast(tf.constant(x), dtype).numpy(), np.float64) for x in arrays]
    tables = [tf.cast(x, table) for x in bias[:2]]
    want = reference.hstu_attention(
        *arrays, offsets, matrices, SCALE, 0.4, RelativeBias(*(np.float64(x) for x in tables), *bias[2:])
    )
    given_ = RelativeBias(*tables, *bias[2:])

    def attend():
        heads = [tf.cast(x, dtype) for x in arrays]
        return hstu_attention(*heads, tf.constant(offsets), visible, scale=SCALE, alpha=0.4, bias=given_)

    with portable_ops():
        plain = attend()
    for out in (attend(), plain):
        assert out.dtype == dtype
        most = max(1e-6, 4e-3 * (dtype == tf.bfloat16))
        assert np.linalg.norm(np.float64(out) - want) <= most * np.linalg.norm(want)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("most", [0, 2**28], ids=["on the CPU", "in plain TensorFlow"])
def test_without_a_kernel_of_the_gpu_it_is_computed_otherwise_with_one_warning(monkeypatch, most, compiled):
    offsets = tf.constant([0, 3, 3, 10], tf.int64)
    visible = AttentionMask().visible(offsets)
    q, k, v = (tf.random.stateless_normal([10, 2, 5], [seed, 0]) for seed in range(3))

    def attend(q, k, v):
        with tf.GradientTape() as tape:
            tape.watch([q, k, v])
            out = hstu_attention(q, k, v, offsets, visible, scale=0.1)
        return [out, *(tf.convert_to_tensor(x) for x in tape.gradient(out, [q, k, v]))]

    expected = attend(q, k, v)
    attention_device._warn.cache_clear()
    monkeypatch.setattr(attention_device, "on_gpu", lambda: True)
    monkeypatch.setattr(module, "_MOST_PAIRS", most)
    attend_here = tf.function(attend) if compiled else attend
    with pytest.warns(UserWarning, match="they take bfloat16 and float16, not float32"):
        found = attend_here(q, k, v)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend(q, k, v)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_graph_plans_and_maps_times_once_for_all_layers():
    """As TensorFlow runs it: a map takes a byte for each pair, and on a GPU the host waits for its size."""

    @tf.function(
        input_signature=[tf.TensorSpec([None, 1, 4]), *(tf.TensorSpec([None], t) for t in [tf.int64] * 2)]
    )
    def gradients(x, offsets, times):
        tables = tf.ones([7]), tf.ones([129])
        with tf.GradientTape() as tape:
            tape.watch(tables)
            for _ in range(3):
                bias = RelativeBias(*tables, times, times)
                x += hstu_attention(x, x, x, offsets, AttentionMask().visible(offsets), scale=0.1, bias=bias)
        return tape.gradient(x, tables)

    graph = gradients.get_concrete_function().graph
    exported = saver.export_meta_graph(graph_def=graph.as_graph_def(), graph=graph)
    exported.collection_def["train_op"].node_list.value.extend(output.name for output in graph.outputs)
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.meta_optimizer_iterations = 1
    optimized = tf_optimizer.OptimizeGraph(config, exported)

    def count(nodes):
        return [sum(x.op == f"GmetaHstu{name}" for x in nodes) for name in ("Plan", "TimeMap", "Attention")]

    assert count(graph.as_graph_def().node) == [3, 3, 3]
    assert count(optimized.node) == [1, 1, 3]
