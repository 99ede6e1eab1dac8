"""Tokens that are appended to kept keys and values are as those of a whole sequence that is read at once."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.layers import HSTU, FuXi
from gmeta.layers.sequence.reading import sequence_view
from gmeta.ops import AttentionMask, Jagged, jagged

DIM = 6


def make(max_length=9, **given):
    hstu = HSTU(blocks=2, heads=2, attention_dim=3, value_dim=4, max_length=max_length, **given)
    hstu(Jagged(tf.zeros([1, DIM]), tf.constant([0, 1], tf.int64)), times=tf.zeros([1], tf.int64))
    random = np.random.default_rng(0)
    for weight in hstu.weights:  # so that biases and what attention adds aren't lost beside the tokens
        weight.assign(weight + random.normal(0, 0.5, weight.shape))
    return hstu


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    beams=st.integers(1, 3),
    steps=st.integers(1, 3),
    form=st.sampled_from(["research", "production"]),
    timed=st.booleans(),
    window=st.sampled_from([None, 1, 4]),
    seed=st.integers(0, 99),
)
def test_what_is_appended_is_as_if_it_had_been_there(lengths, beams, steps, form, timed, window, seed):
    random = np.random.default_rng(seed)
    hstu = make(form=form, bias_by_time=timed, mask=AttentionMask(window=window))
    total = sum(lengths)
    values = random.normal(size=(total, DIM)).astype(np.float32)
    offsets = np.cumsum([0, *lengths])
    times = [np.sort(random.integers(0, 10**5, n)) for n in lengths]
    now = np.array([own[-1] + random.integers(0, 1000) for own in times])
    flat, column = Jagged(tf.constant(values), tf.constant(offsets)), tf.constant(np.concatenate(times))
    view = sequence_view(hstu.mask, flat.offsets, times=column)
    following = np.concatenate([[*own[1:], late] for own, late in zip(times, now, strict=True)])
    view = view._replace(row_times=tf.constant(following))  # the last token tells what comes then
    out, reading = hstu.read(flat, view=view if timed else view._replace(column_times=None))
    np.testing.assert_allclose(out.values, hstu(flat, view=view).values, rtol=1e-4, atol=1e-5)

    told = np.zeros((len(lengths), beams, 0, DIM), np.float32)
    for step in range(steps):
        parents = random.integers(0, beams, (len(lengths), beams))
        token = random.normal(size=(len(lengths), beams, DIM)).astype(np.float32)
        if step:
            told = np.take_along_axis(told, parents[:, :, None, None], 1)
        told = np.concatenate([told, token[:, :, None]], 2)
        found, reading = hstu.read_on(
            tf.constant(token), reading, tf.constant(parents) if step else None, now if timed else None
        )
        whole, ends, own = [], [0], []
        for user, beam in np.ndindex(len(lengths), beams):
            whole += [values[offsets[user] : offsets[user + 1]], told[user, beam]]
            own += [times[user], [now[user]] * (step + 1)]
            ends.append(ends[-1] + lengths[user] + step + 1)
        again = hstu(
            Jagged(tf.concat(whole, 0), tf.constant(ends, tf.int64)),
            times=np.concatenate(own, dtype=np.int64),
        )
        last = tf.reshape(jagged.last(again), found.shape)
        np.testing.assert_allclose(found, last, rtol=1e-3, atol=2e-5)


def test_gradients_reach_what_was_kept():
    hstu = make(bias_by_time=False)
    values = tf.random.stateless_normal([5, DIM], [1, 2])
    token = tf.random.stateless_normal([1, 1, DIM], [3, 4])
    offsets = tf.constant([0, 5], tf.int64)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(values)
        _, reading = hstu.read(Jagged(values, offsets))
        kept = tf.reduce_sum(hstu.read_on(token, reading)[0] ** 2)
        whole = Jagged(tf.concat([values, token[0]], 0), tf.constant([0, 6], tf.int64))
        again = tf.reduce_sum(hstu(whole).values[-1] ** 2)
    weights = [values, *hstu.trainable_variables]
    for one, other in zip(tape.gradient(kept, weights), tape.gradient(again, weights), strict=True):
        np.testing.assert_allclose(
            tf.convert_to_tensor(one), tf.convert_to_tensor(other), rtol=1e-3, atol=1e-4
        )


def test_what_cant_be_read_on_is_named():
    sequence = Jagged(tf.zeros([1, DIM]), tf.constant([0, 1], tf.int64))
    settings = {"blocks": 1, "heads": 1, "attention_dim": 2, "value_dim": 2, "max_length": 4}
    with pytest.raises(ConfigError, match="FuXiBlock can't read on, as it keeps no keys and values: take"):
        FuXi(**settings, bias_by_time=False).read(sequence)
    for mask in (AttentionMask(causal=False), AttentionMask(window=2, full_tail=1)):
        with pytest.raises(ConfigError, match="the mask must be causal, without by_time and full_tail, got"):
            HSTU(**settings, bias_by_time=False, mask=mask).read(sequence)
    with pytest.raises(ConfigError, match="needs times: pass times="):
        HSTU(**settings).read(sequence)
    _, reading = HSTU(**settings).read(sequence, times=tf.constant([3], tf.int64))
    with pytest.raises(ConfigError, match="read sequences with times: pass times="):
        HSTU(**settings).read_on(tf.zeros([1, 2, DIM]), reading)


def test_dropout_is_of_training_alone():
    hstu = make(bias_by_time=False, dropout=0.5)
    flat = Jagged(tf.ones([4, DIM]), tf.constant([0, 4], tf.int64))
    first, again = (hstu.read(flat)[0].values for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert (hstu.read(flat, training=True)[0].values.numpy() != first.numpy()).any()
    assert jagged.last(hstu.read(flat)[0]).shape == (1, DIM)
