"""FuXi-α's block against the equations in NumPy."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.layers.sequence.stack import FuXiBlock
from gmeta.ops import AttentionMask, Jagged
from support.drawn_batches import draw_sequences
from support.layer_parity import check_layer, own_name
from support.reference.sequence_layers import fuxi_block

SIZES = {"heads": 2, "attention_dim": 3, "value_dim": 4, "max_length": 6}


@settings(max_examples=6)
@given(
    seed=st.integers(0, 2**20),
    sizes=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 2)), max_size=3),
    by_place=st.booleans(),
    by_time=st.booleans(),
    ffn_multiply=st.sampled_from([0.5, 1, 2]),
)
def test_outputs_and_gradients_are_those_of_the_equations(seed, sizes, by_place, by_time, ffn_multiply):
    drawn = draw_sequences(seed, sizes, 5, AttentionMask())
    check_layer(
        lambda dtype: FuXiBlock(
            **SIZES, bias_by_place=by_place, bias_by_time=by_time, ffn_multiply=ffn_multiply, dtype=dtype
        ),
        lambda layer, x: layer(Jagged(x, tf.constant(drawn.offsets)), **drawn.arguments).values,
        lambda x, weights: fuxi_block(
            x,
            weights,
            drawn.offsets,
            drawn.masks,
            (drawn.row_times, drawn.times),
            *SIZES.values(),
        ),
        drawn.x,
        seed,
    )


def test_weights_start_as_the_published_code_has_them():
    block = FuXiBlock(heads=2, attention_dim=32, value_dim=32, max_length=500, ffn_multiply=2)
    block(Jagged(tf.zeros([1, 64]), tf.constant([0, 1], tf.int64)), times=[0])
    values = {own_name(v, block): v.numpy() for v in block.weights}
    for name in ("uvqk/kernel", "relative_bias/positions", "relative_bias/time_buckets"):
        np.testing.assert_allclose(values[name].std(), 0.02, rtol=0.2)
    for name in ("joined/kernel", "ffn/gate", "ffn/up", "ffn/down"):
        limit = (6 / sum(values[name].shape)) ** 0.5
        assert 0.95 * limit < np.abs(values[name]).max() <= limit
    assert not np.array_equal(values["ffn/gate"], values["ffn/up"])
    assert values["uvqk/kernel"].shape == (64, (3 + 1 + 1 + 1) * 64)
    assert values["joined/kernel"].shape == (3 * 64, 64)


def test_a_width_that_makes_no_sense_is_refused():
    with pytest.raises(ConfigError, match="ffn_multiply must be above 0, got 0"):
        FuXiBlock(**SIZES, ffn_multiply=0)


def test_a_horizon_is_of_scores_and_refused_by_tables_of_weights():
    with pytest.raises(ConfigError, match="leave out horizon="):
        FuXiBlock(**SIZES, horizon=60.0)
