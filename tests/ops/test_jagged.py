"""Jagged sequences against lists of arrays, values and gradients."""

import re
from itertools import pairwise

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.ops import Jagged, jagged
from support.reference import jagged as reference

INNER = st.sampled_from([(), (3,), (2, 2), (0,)])
LENGTHS = st.lists(st.integers(0, 5), max_size=4)
examples = settings(max_examples=25)


def drawn(lengths, inner, seed=0):
    """A batch both ways. Values are unlike each other, so that a token in a wrong place is seen."""
    offsets = np.cumsum([0, *lengths])
    values = np.random.default_rng(seed).normal(size=(offsets[-1], *inner))
    return Jagged(tf.constant(values), tf.constant(offsets)), reference.rows(values, offsets)


def same(found, rows, inner):
    """The jagged tensor is that list, and its offsets are sound."""
    assert found.offsets.dtype == tf.int64
    np.testing.assert_array_equal(found.offsets, np.cumsum([0, *map(len, rows)]))
    np.testing.assert_array_equal(found.values, np.concatenate([np.zeros((0, *inner)), *rows]))
    assert found.values.shape[1:] == inner


def numbered(rows, begin=1):
    """The same batch with each token's number, from ``begin``, in place of its values."""
    ends = begin + np.cumsum([0, *map(len, rows)])
    return [np.arange(a, b, dtype=np.float64) for a, b in pairwise(ends)]


def expected_gradient(numbers, upstream, tokens):
    """Each token receives what came to the places where its number went; 0 is padding."""
    gradient = np.zeros((tokens + 1, *np.shape(upstream)[np.ndim(numbers) :]))
    np.add.at(gradient, np.asarray(numbers, int), upstream)
    return gradient[1:]


def check_gradient(function, tensors, numbers, seed=1):
    """``function`` of values alone has the gradient that the reference's moves of ``numbers`` say."""
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        out = function(*tensors)
    upstream = np.random.default_rng(seed).normal(size=out.shape)
    found = tape.gradient(out, tensors, tf.constant(upstream))
    wanted = expected_gradient(numbers, upstream, sum(len(each) for each in tensors))
    np.testing.assert_allclose(np.concatenate(found), wanted, rtol=1e-12)


def flat(rows):
    return np.concatenate([np.zeros(0), *rows])


@examples
@given(LENGTHS, INNER)
def test_lengths_and_places(lengths, inner):
    batch, rows = drawn(lengths, inner)
    assert jagged.lengths(batch).numpy().tolist() == lengths
    assert jagged.row_ids(batch).numpy().tolist() == reference.row_ids(rows)
    assert jagged.positions(batch).numpy().tolist() == reference.positions(rows)


@examples
@given(LENGTHS, INNER)
def test_to_ragged_and_back(lengths, inner):
    batch, rows = drawn(lengths, inner)
    ragged = jagged.to_ragged(batch)
    assert ragged.row_lengths().numpy().tolist() == lengths
    same(jagged.from_ragged(ragged), rows, inner)
    short = tf.RaggedTensor.from_row_splits(batch.values, tf.cast(batch.offsets, tf.int32))
    same(jagged.from_ragged(short), rows, inner)


@examples
@given(LENGTHS, INNER, st.sampled_from([None, 5, 7]), st.sampled_from([0, -1.5]))
def test_to_padded_and_back(lengths, inner, length, fill):
    batch, rows = drawn(lengths, inner)
    padded = jagged.to_padded(batch, length, fill)
    np.testing.assert_array_equal(padded, reference.to_padded(rows, inner, length, fill))
    same(jagged.from_padded(padded, lengths), rows, inner)
    same(jagged.from_padded(padded, lengths), reference.from_padded(padded.numpy(), lengths), inner)
    check_gradient(
        lambda values: jagged.to_padded(batch._replace(values=values), length, fill),
        [batch.values],
        reference.to_padded(numbered(rows), (), length),
    )
    kept = reference.from_padded(
        np.arange(1, padded.shape[0] * padded.shape[1] + 1).reshape(padded.shape[:2]), lengths
    )
    check_gradient(
        lambda values: jagged.from_padded(tf.reshape(values, padded.shape), lengths).values,
        [tf.reshape(padded, [padded.shape[0] * padded.shape[1], *inner])],
        flat(kept),
    )


@examples
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=4), INNER)
def test_concat_and_split(both, inner):
    (first, first_rows), (second, second_rows) = (
        drawn([pair[part] for pair in both], inner, part) for part in range(2)
    )
    joined, rows = jagged.concat(first, second), reference.concat(first_rows, second_rows)
    same(joined, rows, inner)
    heads = [pair[0] for pair in both]
    for found, want in zip(jagged.split(joined, heads), reference.split(rows, heads), strict=True):
        same(found, want, inner)
    check_gradient(
        lambda *values: (
            jagged.concat(first._replace(values=values[0]), second._replace(values=values[1])).values
        ),
        [first.values, second.values],
        flat(reference.concat(numbered(first_rows), numbered(second_rows, 1 + sum(map(len, first_rows))))),
    )
    third, third_rows = drawn([pair[0] for pair in both][::-1], inner, 2)
    three = [first_rows, second_rows, third_rows]
    same(jagged.concat(first, second, third), reference.concat(*three), inner)
    before = np.cumsum([1, *(sum(map(len, rows)) for rows in three)])
    check_gradient(
        lambda *values: (
            jagged.concat(
                *(each._replace(values=x) for each, x in zip((first, second, third), values, strict=True))
            ).values
        ),
        [first.values, second.values, third.values],
        flat(reference.concat(*(numbered(rows, b) for rows, b in zip(three, before, strict=False)))),
    )
    for part in range(2):
        check_gradient(
            lambda values, part=part: jagged.split(joined._replace(values=values), heads)[part].values,
            [joined.values],
            flat(reference.split(numbered(rows), heads)[part]),
        )


@examples
@given(LENGTHS, INNER, st.data())
def test_slices(lengths, inner, data):
    batch, rows = drawn(lengths, inner)
    begin = [data.draw(st.integers(0, length)) for length in lengths]
    size = [data.draw(st.integers(0, length - b)) for length, b in zip(lengths, begin, strict=True)]
    same(jagged.slice_(batch, begin, size), reference.slice_(rows, begin, size), inner)
    same(jagged.slice_(batch, begin), reference.slice_(rows, begin, lengths), inner)
    same(jagged.slice_(batch, 0, min([9, *lengths])), [row[: min(lengths)] for row in rows], inner)
    check_gradient(
        lambda values: jagged.slice_(batch._replace(values=values), begin, size).values,
        [batch.values],
        flat(reference.slice_(numbered(rows), begin, size)),
    )


@examples
@given(LENGTHS, INNER)
def test_reverse_and_last(lengths, inner):
    batch, rows = drawn(lengths, inner)
    same(jagged.reverse(batch), reference.reverse(rows), inner)
    np.testing.assert_array_equal(jagged.last(batch), reference.last(rows, inner))
    check_gradient(
        lambda values: jagged.reverse(batch._replace(values=values)).values,
        [batch.values],
        flat(reference.reverse(numbered(rows))),
    )
    check_gradient(
        lambda values: jagged.last(batch._replace(values=values)),
        [batch.values],
        reference.last(numbered(rows), ()),
    )


def test_integers_move_too():
    batch = Jagged(tf.constant([5, 6, 7]), tf.constant([0, 2, 3], tf.int64))
    assert jagged.reverse(batch).values.numpy().tolist() == [6, 5, 7]
    assert jagged.to_padded(batch, fill=-1).numpy().tolist() == [[5, 6], [7, -1]]
    assert jagged.last(batch).dtype == tf.int32


def test_gradients_of_gradients():
    batch, _ = drawn([2, 0, 3], (2,))
    with tf.GradientTape() as outer:
        outer.watch(batch.values)
        with tf.GradientTape() as inner:
            inner.watch(batch.values)
            total = tf.reduce_sum(jagged.to_padded(jagged.reverse(batch)) ** 3)
        gradient = inner.gradient(total, batch.values)
    np.testing.assert_allclose(outer.gradient(gradient, batch.values), 6 * batch.values)


def test_in_a_graph_without_sizes():
    @tf.function(
        input_signature=[
            tf.TensorSpec([None, 2]),
            tf.TensorSpec([None], tf.int64),
            tf.TensorSpec([None], tf.int64),
        ]
    )
    def moved(values, offsets, heads):
        assert not tf.executing_eagerly()
        with tf.GradientTape() as tape:
            tape.watch(values)
            first, second = jagged.split(Jagged(values, offsets), heads)
            back = jagged.concat(jagged.reverse(jagged.reverse(first)), jagged.slice_(second, 0))
            again = jagged.from_padded(jagged.to_padded(back), jagged.lengths(back))
            assert again.values.shape.as_list() == [None, 2]
            total = tf.reduce_sum(again.values**2)
        return again.values, tape.gradient(total, values)

    for lengths, heads in (([3, 0, 2], [1, 0, 2]), ([0, 0], [0, 0]), ([], [])):
        batch, _ = drawn(lengths, (2,))
        values = tf.cast(batch.values, tf.float32)
        found, gradient = moved(values, batch.offsets, tf.constant(heads, tf.int64))
        np.testing.assert_array_equal(found, values)
        np.testing.assert_array_equal(gradient, 2 * values)
    with pytest.raises(tf.errors.InvalidArgumentError, match="split: a head of"):
        moved(tf.zeros([1, 2]), tf.constant([0, 1], tf.int64), tf.constant([2], tf.int64))


@pytest.mark.parametrize(
    ("refused", "told"),
    [
        (lambda b: jagged.split(b, [1, 3]), "sequence.*1.*split: a head of.*3.*tokens of a sequence of.*2"),
        (lambda b: jagged.split(b, [-1, 0]), "sequence.*0.*a head of.*-1"),
        (lambda b: jagged.slice_(b, 1, 2), "sequence.*1.*slice_: begin"),
        (lambda b: jagged.slice_(b, [0, 3]), "sequence.*1.*begin"),
        (lambda b: jagged.to_padded(b, 2), "sequence.*0.*to_padded: a sequence of.*3"),
        (lambda b: jagged.from_padded(tf.zeros([1, 2]), [3]), "a length of.*3.*in a row of.*2"),
        (lambda b: jagged.concat(b, drawn([1], ())[0]), "concat: batches of.*2.*1"),
    ],
)
def test_what_does_not_fit_is_refused(refused, told):
    batch, _ = drawn([3, 2], ())
    with pytest.raises(tf.errors.InvalidArgumentError) as refusal:
        refused(batch)
    assert re.search(told, str(refusal.value), re.DOTALL), refusal.value


def test_shapes_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="got 2"):
        jagged.from_ragged(tf.ragged.constant([[[1], [2, 3]]]))
    with pytest.raises(ConfigError, match=r"\(3,\)"):
        jagged.from_padded(tf.zeros([3]), [1])


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
def test_gradients_of_a_row_that_many_take_are_whole_in_half_precision(dtype):
    values = tf.ones([2, 3], dtype)
    with tf.GradientTape() as tape:
        tape.watch(values)
        taken = jagged.take(values, tf.zeros([1024], tf.int32))
    np.testing.assert_array_equal(tape.gradient(taken, values), [[1024] * 3, [0] * 3])
