"""What must hold of every block over jagged sequences, whatever its equations."""

import functools
import random

import numpy as np
import pytest
import tensorflow as tf

from gmeta.core.errors import ConfigError
from gmeta.layers import HSTU, FuXi
from gmeta.layers.sequence.hstu import HSTUBlock
from gmeta.layers.sequence.stack import FuXiBlock
from gmeta.ops import AttentionMask, Jagged
from support.drawn_batches import draw_sequences

SIZES = {"heads": 2, "attention_dim": 4, "value_dim": 4, "max_length": 12, "seed": 5}
BLOCKS = {
    "research": functools.partial(HSTUBlock, **SIZES),
    "production": functools.partial(HSTUBlock, form="production", **SIZES),
    "stack": functools.partial(HSTU, blocks=2, **SIZES),
    "fuxi": functools.partial(FuXiBlock, **SIZES),
    "fuxi stack": functools.partial(FuXi, blocks=2, ffn_multiply=2, **SIZES),
}
DIM = 8
every_block = pytest.mark.parametrize("make", BLOCKS.values(), ids=BLOCKS)


def called(layer, drawn, training=False, dtype=tf.float32):
    batch = Jagged(tf.constant(drawn.x, dtype), tf.constant(drawn.offsets))
    return layer(batch, **drawn.arguments, training=training).values.numpy()


def moved(layer):
    """The layer with other weights than its initial ones, by which mistakes show."""
    rng = np.random.default_rng(9)
    for variable in layer.trainable_weights:
        variable.assign_add(0.3 * rng.normal(size=variable.shape))
    return layer


@every_block
def test_a_sequence_does_not_depend_on_its_neighbours(make):
    drawn = draw_sequences(1, [(1, 9, 2), (0, 40, 0), (2, 0, 1)], DIM, AttentionMask())
    layer = make()
    called(layer, drawn)
    together = called(moved(layer), drawn)
    for sequence in range(3):
        begin, end = drawn.offsets[sequence : sequence + 2]
        # To rounding: a matrix product's order of additions may depend on how many rows it has.
        np.testing.assert_allclose(
            called(layer, drawn.only(sequence)), together[begin:end], rtol=1e-5, atol=1e-5
        )


@every_block
def test_targets_see_neither_each_other_nor_are_seen(make):
    drawn = draw_sequences(2, [(1, 6, 3)], DIM, AttentionMask())
    layer = make()
    called(layer, drawn)
    before = called(moved(layer), drawn)
    x, times = drawn.x.copy(), drawn.times.copy()
    x[8], times[8] = 7.0, times[8] + 10**7  # the second of three targets
    after = called(layer, drawn._replace(x=x, times=times))
    others = np.arange(10) != 8
    np.testing.assert_array_equal(after[others], before[others])
    assert np.abs(after[8] - before[8]).max() > 0.1


@every_block
def test_the_past_does_not_know_the_future(make):
    drawn = draw_sequences(3, [(0, 9, 0)], DIM, AttentionMask())
    layer = make()
    called(layer, drawn)
    before = called(moved(layer), drawn)
    x = drawn.x.copy()
    x[5:] += 1
    np.testing.assert_array_equal(called(layer, drawn._replace(x=x))[:5], before[:5])


@every_block
def test_dropout_is_of_training_alone_and_by_seed(make):
    drawn = draw_sequences(4, [(0, 9, 0), (0, 4, 0)], DIM, AttentionMask())

    def outputs():
        random.seed(1)  # of initial weights
        tf.random.set_seed(1)  # of what is dropped
        layer = make(dropout=0.5)
        return [called(layer, drawn, training) for training in (True, True, False, False)]

    one, two, still, same = outputs()
    again = outputs()
    np.testing.assert_array_equal([one, two, still], again[:3])
    assert np.abs(one - two).max() > 1e-3
    assert np.abs(one - still).max() > 1e-3
    np.testing.assert_array_equal(still, same)


@every_block
def test_ragged_sequences_give_the_same_numbers_ragged(make):
    drawn = draw_sequences(10, [(1, 9, 2), (0, 0, 0), (0, 7, 1)], DIM, AttentionMask())
    layer = make()
    expected = called(layer, drawn)
    lengths = np.diff(drawn.offsets)
    x = tf.RaggedTensor.from_row_lengths(tf.constant(drawn.x, tf.float32), lengths)
    times = tf.RaggedTensor.from_row_lengths(drawn.times, lengths)
    for given in (times, drawn.times):
        out = layer(x, **{**drawn.arguments, "times": given})
        assert out.row_lengths().numpy().tolist() == lengths.tolist()
        np.testing.assert_array_equal(out.values, expected)
    other = tf.RaggedTensor.from_row_lengths(drawn.times, lengths[::-1])
    with pytest.raises(tf.errors.InvalidArgumentError, match="rows of times= have other lengths"):
        layer(x, **{**drawn.arguments, "times": other})


@every_block
@pytest.mark.shown_by(case="research")
def test_a_functional_model_is_made_of_ragged_inputs(make):
    layer = make()
    tokens = tf.keras.Input([None, DIM], ragged=True)
    times = tf.keras.Input([None], ragged=True, dtype=tf.int64)
    model = tf.keras.Model([tokens, times], layer(tokens, times=times))
    drawn = draw_sequences(11, [(0, 9, 0), (0, 4, 0)], DIM, AttentionMask())
    lengths = np.diff(drawn.offsets)
    given = [tf.RaggedTensor.from_row_lengths(each, lengths) for each in (drawn.x.astype("f"), drawn.times)]
    np.testing.assert_allclose(
        model.predict(given, verbose=0).values, called(layer, drawn), rtol=1e-5, atol=1e-6
    )


@every_block
def test_what_is_no_sequences_is_refused(make):
    with pytest.raises(ConfigError, match=r"takes a tf.RaggedTensor of shape \(batch, None, dim\)"):
        make()(tf.zeros([2, 3, DIM]))
    with pytest.raises(ConfigError, match=r"shape \(batch, None, dim\).* got \(2, None\)"):
        make()(tf.ragged.constant([[1.0, 2.0], [3.0]]))


@every_block
@pytest.mark.shown_by(case="fuxi")
def test_in_a_graph_without_sizes(make):
    layer = make(mask=AttentionMask(window=5))
    vector = tf.TensorSpec([None], tf.int64)

    @tf.function(input_signature=[tf.TensorSpec([None, DIM]), *[vector] * 4])
    def traced(values, offsets, contexts, targets, times):
        out = layer(Jagged(values, offsets), contexts=contexts, targets=targets, times=times)
        assert out.values.shape.as_list() == [None, DIM]
        return out.values

    for sizes in ([(1, 5, 2), (0, 0, 0), (0, 7, 0)], [(0, 0, 0)], []):
        drawn = draw_sequences(5, sizes, DIM, layer.mask)
        found = traced(tf.constant(drawn.x, tf.float32), drawn.offsets, *drawn.arguments.values())
        np.testing.assert_allclose(found, called(layer, drawn), rtol=1e-5, atol=1e-6)


@every_block
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_computes_in_half_and_trains_in_float32(make, policy):
    drawn = draw_sequences(6, [(0, 9, 0), (1, 4, 2)], DIM, AttentionMask())
    layer, exact = make(dtype=policy), make()
    with tf.GradientTape() as tape:
        out = layer(Jagged(tf.constant(drawn.x, tf.float32), tf.constant(drawn.offsets)), **drawn.arguments)
    assert out.values.dtype == layer.compute_dtype
    gradients = tape.gradient(out.values, layer.trainable_weights)
    assert {w.dtype for w in layer.weights} == {tf.float32}
    assert all(np.isfinite(tf.convert_to_tensor(g)).all() for g in gradients)
    # bfloat16 has 8 bits; a block adds little to its tokens, which are of about 1.
    np.testing.assert_allclose(tf.cast(out.values, tf.float32), called(exact, drawn), atol=0.05)


@every_block
def test_a_layer_made_from_its_config_is_the_same(make):
    layer = make(mask=AttentionMask(window=3, full_tail=2), dropout=0.1, name="trunk")
    again = type(layer).from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    assert again.mask == layer.mask
    drawn = draw_sequences(7, [(0, 9, 0)], DIM, layer.mask)
    np.testing.assert_array_equal(called(layer, drawn), called(again, drawn))


@every_block
def test_a_saved_model_is_loaded_whole(make, tmp_path):
    tokens = tf.keras.Input([DIM])
    offsets, times = (tf.keras.Input([], dtype=tf.int64) for _ in range(2))
    out = make()(Jagged(tokens, offsets), times=times)
    model = tf.keras.Model([tokens, offsets, times], out.values)
    moved(model)
    drawn = draw_sequences(8, [(0, 9, 0), (0, 3, 0)], DIM, AttentionMask())
    inputs = [tf.constant(drawn.x, tf.float32), tf.constant(drawn.offsets), tf.constant(drawn.times)]
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(inputs), model(inputs))


@pytest.mark.parametrize(("policy", "dropout"), [("float32", 0.0), ("mixed_bfloat16", 0.0), ("float32", 0.4)])
@pytest.mark.parametrize("kind", [HSTU, FuXi], ids=["hstu", "fuxi"])
def test_blocks_that_are_recomputed_have_the_same_gradients(kind, dropout, policy):
    drawn = draw_sequences(3, [(1, 9, 2), (0, 4, 0)], DIM, AttentionMask())
    x = tf.constant(drawn.x, tf.float32)

    def gradients(layer, by_function):
        def of_loss():
            with tf.GradientTape() as tape:
                tape.watch(x)
                out = layer(Jagged(x, tf.constant(drawn.offsets)), **drawn.arguments, training=True).values
                loss = tf.reduce_sum(tf.cast(out, tf.float32) ** 2)
            return [out, *tape.gradient(loss, [x, *layer.trainable_weights])]

        return (tf.function(of_loss) if by_function else of_loss)()

    settings = {"blocks": 3, "dropout": dropout, "dtype": policy, **SIZES}
    kept, again = moved_alike(kind(**settings), kind(**settings, recompute="block"), drawn)
    assert kind.from_config(again.get_config()).recompute == "block"
    if not dropout:
        for by_function in (False, True):
            for one, other in zip(gradients(kept, by_function), gradients(again, by_function), strict=True):
                # Where TensorFlow fuses ops, half precision is rounded in other places.
                near = {"rtol": 1e-6, "atol": 1e-6} if policy == "float32" else {"rtol": 0.05, "atol": 0.05}
                np.testing.assert_allclose(tf.cast(one, tf.float32), tf.cast(other, tf.float32), **near)
        return
    # With dropout, the gradient belongs to the numbers that the forward pass dropped: along a direction, the
    # loss of a repeated call changes as the gradient says.
    seeds = [block.drop.draw_seed() for block in again.blocks]
    for block, seed in zip(again.blocks, seeds, strict=True):
        block.drop.draw_seed = lambda seed=seed: seed

    def loss_at(x):
        out = again(Jagged(x, tf.constant(drawn.offsets)), **drawn.arguments, training=True).values
        return tf.reduce_sum(tf.cast(out, tf.float64) ** 2)

    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = loss_at(x)
    along = tape.gradient(loss, x)
    step = 1e-3 / float(tf.norm(along))
    change = float(loss_at(x + step * along) - loss_at(x - step * along)) / (2 * step)
    assert change == pytest.approx(float(tf.reduce_sum(along**2)), rel=2e-3)


def test_a_bad_gradient_stays_in_its_sequence_when_blocks_are_recomputed():
    layer, x = HSTU(blocks=2, recompute="block", **SIZES), tf.random.stateless_normal([9, DIM], [1, 2])
    batch = Jagged(x, tf.constant([0, 4, 9], tf.int64))
    with tf.GradientTape() as tape:
        tape.watch(x)
        out = layer(batch._replace(values=x), times=tf.range(9), training=True).values
    upstream = tf.tensor_scatter_nd_update(tf.ones_like(out), [[0, 0]], [np.nan])
    bad = np.isnan(tape.gradient(out, x, upstream)).any(axis=1)
    assert bad[:4].any()
    assert not bad[4:].any()


def test_recomputing_refuses_a_training_that_a_graph_decides():
    layer = HSTU(blocks=1, recompute="block", **SIZES)
    batch = Jagged(tf.zeros([2, DIM]), tf.constant([0, 2], tf.int64))

    @tf.function
    def call(training):
        return layer(batch, times=tf.range(2), training=training).values

    with pytest.raises(ConfigError, match="training=True or False, not a tensor"):
        call(tf.constant(True))
    with pytest.raises(ConfigError, match="must be 'block' or None, got 'all'"):
        HSTU(blocks=1, recompute="all", **SIZES)


def moved_alike(one, other, drawn):
    """Two layers with the same weights."""
    for layer in (one, other):
        called(layer, drawn)
    moved(one)
    for own, given in zip(other.weights, one.weights, strict=True):
        own.assign(given)
    return one, other
