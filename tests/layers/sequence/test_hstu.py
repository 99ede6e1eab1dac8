"""HSTU's blocks against the equations in NumPy, and what must hold of any block over sequences."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.layers import HSTU
from gmeta.layers.sequence.block import decaying_scores
from gmeta.layers.sequence.hstu import HSTUBlock
from gmeta.layers.sequence.reading import sequence_view
from gmeta.ops import AttentionMask, Jagged
from gmeta.ops.attention_inputs import time_bucket
from support.drawn_batches import draw_sequences
from support.layer_parity import check_layer, own_name
from support.reference.sequence_layers import hstu_block

SIZES = {"heads": 2, "attention_dim": 3, "value_dim": 4, "max_length": 6}
MASKS = [AttentionMask(), AttentionMask(window=2, full_tail=1), AttentionMask(contexts_see="history")]


@settings(max_examples=8)
@given(
    seed=st.integers(0, 2**20),
    sizes=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 2)), max_size=3),
    heads=st.integers(1, 2),
    by_place=st.booleans(),
    by_time=st.booleans(),
    mask=st.sampled_from(MASKS),
    form=st.sampled_from(["research", "production"]),
)
def test_outputs_and_gradients_are_those_of_the_equations(seed, sizes, heads, by_place, by_time, mask, form):
    drawn = draw_sequences(seed, sizes, 5, mask)
    sizes = {**SIZES, "heads": heads}

    def call(layer, x):
        return layer(Jagged(x, tf.constant(drawn.offsets)), **drawn.arguments).values

    check_layer(
        lambda dtype: HSTUBlock(
            **sizes, form=form, bias_by_place=by_place, bias_by_time=by_time, mask=mask, dtype=dtype
        ),
        call,
        lambda x, weights: hstu_block(
            x,
            weights,
            drawn.offsets,
            drawn.masks,
            (drawn.row_times, drawn.times),
            heads,
            sizes["attention_dim"],
            sizes["value_dim"],
            sizes["max_length"],
            form,
        ),
        drawn.x,
        seed,
    )


def test_bias_tables_stay_float32_under_mixed_precision():
    policy = tf.keras.mixed_precision.Policy("mixed_bfloat16")
    block = HSTUBlock(heads=2, attention_dim=4, value_dim=4, max_length=9, bias_by_time=False, dtype=policy)
    x = Jagged(tf.ones([5, 8], tf.bfloat16), tf.constant([0, 2, 5], tf.int64))
    assert block(x).values.dtype == tf.bfloat16
    assert block.bias_tables(sequence_view(block.mask, x.offsets)).positions.dtype == tf.float32


def test_weights_start_as_the_published_code_has_them():
    block = HSTUBlock(heads=2, attention_dim=32, value_dim=32, max_length=500, seed=3)
    block(Jagged(tf.zeros([1, 64]), tf.constant([0, 1], tf.int64)), times=[0])
    values = {own_name(v, block): v.numpy() for v in block.weights}
    for name in ("uvqk/kernel", "relative_bias/positions", "relative_bias/time_buckets"):
        np.testing.assert_allclose(values[name].std(), 0.02, rtol=0.2)
    limit = (6 / (64 + 64)) ** 0.5
    assert 0.95 * limit < np.abs(values["output/kernel"]).max() <= limit
    assert 0 < np.abs(values["output/bias"]).max() <= 1 / 8
    assert {name: v.shape for name, v in values.items()} == {
        "uvqk/kernel": (64, 256),
        "output/kernel": (64, 64),
        "output/bias": (64,),
        "relative_bias/positions": (999,),
        "relative_bias/time_buckets": (129,),
    }


@pytest.mark.parametrize("form", ["research", "production"])
def test_a_horizon_lets_recent_tokens_weigh_more_at_the_start(form):
    def built(**settings):
        block = HSTUBlock(
            heads=2, attention_dim=32, value_dim=32, max_length=9, seed=3, form=form, **settings
        )
        block(Jagged(tf.zeros([1, 64]), tf.constant([0, 1], tf.int64)), times=[0])
        return block

    plain, recent = built(), built(horizon=100.0)
    added = recent.bias_tables.time_buckets - plain.bias_tables.time_buckets
    np.testing.assert_allclose(added, decaying_scores(100.0), atol=1e-6)
    np.testing.assert_array_equal(recent.bias_tables.positions, plain.bias_tables.positions)
    u, v, q, k = tf.split(recent.uvqk, 4, axis=1)
    if form == "research":
        np.testing.assert_allclose([np.std(u), np.std(v)], 1 / 8, rtol=0.1)
        np.testing.assert_allclose([np.std(q), np.std(k)], 0.02, rtol=0.1)
    else:
        np.testing.assert_array_equal(recent.uvqk, plain.uvqk)


def test_scores_of_a_horizon_fall_with_the_logarithm_of_time():
    scores = decaying_scores(3600.0)
    for seconds in (60, 3600, 36000):
        bucket = int(time_bucket(tf.constant([seconds], tf.int64))[0])
        assert scores[bucket] == pytest.approx(np.log(3600 / seconds), abs=0.31)
    assert np.all(np.diff(scores[:-1]) <= 0)
    assert scores[-2] == -8
    assert scores[-1] == 1


def test_a_layer_saved_without_a_horizon_has_none():
    config = HSTU(blocks=1, **SIZES, horizon=60.0).get_config()
    assert HSTU.from_config(config).blocks[0].bias_tables.horizon == 60
    config.pop("horizon")
    assert HSTU.from_config(config).blocks[0].bias_tables.horizon is None


def test_blocks_of_a_stack_have_unlike_weights_and_the_same_ones_by_seed():
    def kernels(seed):
        stack = HSTU(blocks=2, **SIZES, seed=seed)
        stack(Jagged(tf.zeros([1, 5]), tf.constant([0, 1], tf.int64)), times=[0])
        return [block.uvqk.numpy() for block in stack.blocks]

    one, again, other = kernels(1), kernels(1), kernels(2)
    np.testing.assert_array_equal(one, again)
    assert len({kernel.tobytes() for kernel in (*one, *other)}) == 4


def test_a_stack_is_its_blocks_one_after_another():
    drawn = draw_sequences(0, [(1, 5, 2), (0, 3, 0)], 5, AttentionMask())
    stack = HSTU(blocks=2, **SIZES)
    batch = Jagged(tf.constant(drawn.x, tf.float32), tf.constant(drawn.offsets))
    out = stack(batch, **drawn.arguments)
    for block in stack.blocks:
        batch = block(batch, **drawn.arguments)
    np.testing.assert_array_equal(out.values, batch.values)
    np.testing.assert_array_equal(out.offsets, drawn.offsets)


def test_times_that_are_needed_are_asked_for():
    batch = Jagged(tf.zeros([2, 5]), tf.constant([0, 2], tf.int64))
    with pytest.raises(ConfigError, match=r"pass times=.*by_time=False"):
        HSTUBlock(**SIZES)(batch)
    with pytest.raises(ConfigError, match="times must be a vector"):
        HSTUBlock(**SIZES)(batch, times=[[1, 2]])


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"form": "other"}, "'other'"),
        ({"heads": 0}, "heads must be at least 1"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"max_length": 0}, "max_length must be at least 1"),
        ({"horizon": 0.0}, "above 0, got 0.0"),
        ({"horizon": float("nan")}, "got nan"),
        ({"horizon": 60.0, "bias_by_time": False}, "there is none"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, told):
    with pytest.raises(ConfigError, match=told):
        HSTUBlock(**{**SIZES, **settings})


def test_a_stack_has_blocks():
    with pytest.raises(ConfigError, match="blocks must be at least 1"):
        HSTU(blocks=0, **SIZES)
