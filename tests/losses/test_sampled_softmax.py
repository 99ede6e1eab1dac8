"""Sampled softmax: its numbers, gradients and negatives, and what mustn't have any influence."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.losses import SampledSoftmax
from gmeta.losses.softmax import uniform_negatives
from gmeta.ops import Jagged
from support.reference import losses as reference

Case = dict[str, Any]


def case(seed: int, n: int, d: int, m: int, *, own: bool = False, corrected: bool = False) -> Case:
    """Samples with few ids, so that a negative is often some sample's positive; some are padding."""
    rng = np.random.default_rng(seed)
    shape = (n, m) if own else (m,)
    found: Case = {
        "queries": rng.normal(size=(n, d)),
        "positives": rng.normal(size=(n, d)),
        "positive_ids": rng.integers(0, 5, n),
        "weights": rng.integers(0, 4, n) * 0.5,
    }
    if m:
        found |= {"negatives": rng.normal(size=(*shape, d)), "negative_ids": rng.integers(0, 5, shape)}
    if corrected:
        found["log_q"] = -rng.exponential(3, n)
        found |= {"negative_log_q": -rng.exponential(3, shape)} if m else {}
    return found


def expected(given: Case, **how: Any) -> np.ndarray:
    renamed = {k: v for k, v in given.items() if k not in ("positive_ids", "weights")}
    return reference.sampled_softmax(
        ids=given["positive_ids"], real=given["weights"] > 0, **renamed, **{"temperature": 0.05, **how}
    )


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 99),
    n=st.integers(0, 6),
    d=st.integers(1, 4),
    m=st.integers(0, 5),
    own=st.booleans(),
    corrected=st.booleans(),
    normalize=st.booleans(),
    in_batch=st.booleans(),
)
def test_it_equals_its_reference(seed, n, d, m, own, corrected, normalize, in_batch):
    given_ = case(seed, n, d, m, own=own, corrected=corrected)
    how = {"temperature": 0.3, "normalize": normalize, "in_batch": in_batch or not m}
    found = SampledSoftmax(**how)(**given_)
    np.testing.assert_allclose(found, expected(given_, **how), rtol=1e-12, atol=1e-13)


def naive(queries: tf.Tensor, positives: tf.Tensor, negatives: tf.Tensor, ids: Any, drawn: Any) -> tf.Tensor:
    """The formula as it reads, in the type of its inputs."""
    q, p, x = (v / tf.norm(v, axis=-1, keepdims=True) for v in (queries, positives, negatives))
    own = tf.exp(tf.reduce_sum(q * p, axis=1) / 0.05)
    candidates = tf.exp(tf.matmul(q, tf.concat([p, x], 0), transpose_b=True) / 0.05)
    other = tf.cast(ids[:, None] != np.concatenate([ids, drawn]), q.dtype)
    return -tf.math.log(own / (own + tf.reduce_sum(other * candidates, axis=1)))


def losses_and_gradients(function: Any, vectors: list[np.ndarray], dtype: tf.DType) -> list[np.ndarray]:
    inputs = [tf.constant(v, dtype) for v in vectors]
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        losses = function(*inputs)
    return [t.numpy().astype(np.float64) for t in (losses, *tape.gradient(losses, inputs))]


@pytest.mark.parametrize("seed", range(3))
def test_losses_and_gradients_are_as_near_float64_as_the_formula_in_float32_is(seed):
    vectors = [np.float32(v) for v in np.random.default_rng(seed).normal(size=(3, 200, 16))]
    ids, drawn = np.arange(200), np.arange(100, 300)
    plain = lambda *given_: naive(*given_, ids, drawn)  # noqa: E731
    ours = lambda q, p, x: SampledSoftmax()(q, p, ids, negatives=x, negative_ids=drawn)  # noqa: E731
    exact = losses_and_gradients(plain, vectors, tf.float64)
    found = losses_and_gradients(ours, vectors, tf.float32)
    compared = losses_and_gradients(plain, vectors, tf.float32)
    for right, value, other in zip(exact, found, compared, strict=True):
        assert np.abs(value - right).max() <= 2 * np.abs(other - right).max()


def test_an_item_is_no_negative_of_itself_and_padding_is_nobodys():
    given_ = case(1, 4, 3, 6)
    given_["positive_ids"], given_["weights"] = np.array([0, 0, 1, 2]), np.array([1.0, 1, 1, 0])
    given_["negative_ids"] = np.array([0, 0, 0, 1, 1, 1])
    before = SampledSoftmax()(**given_).numpy()
    for key in ("queries", "positives"):
        given_[key][3] = math.nan
    with tf.GradientTape() as tape:
        queries, positives = (tf.constant(given_.pop(key)) for key in ("queries", "positives"))
        tape.watch([queries, positives])
        after = SampledSoftmax()(queries, positives, **given_)
    np.testing.assert_array_equal(after, before)
    assert after[3] == 0
    for gradient in tape.gradient(after, [queries, positives]):
        np.testing.assert_array_equal(gradient[3], 0.0)
        assert np.isfinite(gradient).all()
    alone = SampledSoftmax()(queries[:1], positives[:1], [7])
    np.testing.assert_array_equal(alone, [0.0])  # the only candidate is the positive


def test_corrected_scores_undo_a_draw_by_popularity():
    """Of a catalogue drawn by popularity, the corrected loss is that of the full softmax, on average."""
    rng = np.random.default_rng(0)
    items, query = rng.normal(size=(6, 4)), rng.normal(size=(1, 4))
    popularity = np.array([0.3, 0.3, 0.2, 0.1, 0.05, 0.05])
    drawn = rng.choice(6, 20_000, p=popularity)
    drawn = drawn[drawn != 0]
    log_q = np.log(popularity * 20_000)
    loss = SampledSoftmax(temperature=1.0, in_batch=False)
    arguments = {"negatives": items[drawn], "negative_ids": drawn}
    full = loss(query, items[:1], [0], negatives=items, negative_ids=np.arange(6))
    corrected = loss(
        query, items[:1], [0], **arguments, log_q=[0.0], negative_log_q=log_q[drawn]
    )  # the positive is certain: expected once
    assert float(corrected[0]) == pytest.approx(float(full[0]), abs=0.01)
    assert float(loss(query, items[:1], [0], **arguments)[0]) > float(full[0]) + 1


def test_narrow_inputs_are_computed_in_float32():
    vectors = np.random.default_rng(2).normal(size=(2, 5, 8))
    halves = [tf.constant(v, tf.bfloat16) for v in vectors]
    found = SampledSoftmax()(*halves, np.arange(5))
    assert found.dtype == tf.float32
    np.testing.assert_array_equal(
        found, SampledSoftmax()(*(tf.cast(h, tf.float32) for h in halves), np.arange(5))
    )


@pytest.mark.parametrize("step", [0, 7, 2**40 + 3])
def test_draws_are_philox_of_seed_and_step(step):
    seed = 2**63 + 12345
    found = uniform_negatives(11, 1000, seed=seed, step=step)
    np.testing.assert_array_equal(found, reference.uniform_negatives(11, 1000, seed=seed, step=step))
    again = tf.function(uniform_negatives)([11, 1], 1000, seed=seed, step=tf.Variable(step, dtype=tf.int64))
    np.testing.assert_array_equal(again[:, 0], found)


def test_draws_are_even_and_those_of_steps_differ():
    first, second = (uniform_negatives(50_000, 50, seed=3, step=step).numpy() for step in (0, 1))
    counts = np.bincount(first, minlength=50)
    assert len(counts) == 50
    assert ((counts - 1000) ** 2 / 1000).sum() < 95  # chi squared of 49 degrees: above it once in 10,000
    assert (first == second).mean() == pytest.approx(1 / 50, abs=0.005)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda x: SampledSoftmax(temperature=0.0), r"must be above 0, got 0\.0"),
        (lambda x: SampledSoftmax(in_batch=False)(x, x, [1, 2]), "the positive has nothing to compete with"),
        (lambda x: SampledSoftmax()(x, x, [1, 2], negatives=x), "belong together"),
        (
            lambda x: SampledSoftmax()(x, x, [1, 2], negatives=x, negative_ids=[3, 4], log_q=[0.0, 0.0]),
            "give both or none",
        ),
        (lambda x: SampledSoftmax()(x, x, [1, 2], negative_log_q=[0.0]), "and no negatives"),
        (lambda x: uniform_negatives(3, 0, seed=1, step=0), "items must be a whole number from 1 on, got 0"),
        (lambda x: uniform_negatives(3, 5, seed=-1, step=0), "seed must be a whole number"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        wrong(tf.ones([2, 3]))


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 99),
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    m=st.integers(1, 4),
    look_back=st.booleans(),
    negatives_of=st.sampled_from(["all", "group", "sample"]),
)
def test_groups_and_what_samples_look_back_at(seed, lengths, m, look_back, negatives_of):
    """Each sample alone, with the negatives that are its and the earlier items among them."""
    n, loss = sum(lengths), SampledSoftmax(temperature=0.5, normalize=False, in_batch=False)
    base = case(seed, n, 3, m)
    base.pop("weights")
    rng, offsets = np.random.default_rng(seed), np.cumsum([0, *lengths])
    if negatives_of != "all":
        shape = (len(lengths) if negatives_of == "group" else n, m)
        base |= {"negatives": rng.normal(size=(*shape, 3)), "negative_ids": rng.integers(0, 5, shape)}
    earlier, earlier_ids, log_q = rng.normal(size=(n, 3)), rng.integers(0, 5, n), 0.7
    looked_at = Jagged(tf.constant(earlier), tf.constant(offsets))
    back = {"earlier": looked_at, "earlier_ids": earlier_ids, "earlier_log_q": log_q} if look_back else {}
    offered = {"offsets": tf.constant(offsets)} if negatives_of == "group" else {}
    found = loss(**base, **back, **offered).numpy()
    for group, (begin, end) in enumerate(itertools.pairwise(offsets)):
        for i in range(begin, end):
            past = slice(begin, i + 1) if look_back else slice(0, 0)
            query, own_id = base["queries"][i], base["positive_ids"][i]
            mine = {"all": ..., "group": group, "sample": i}[negatives_of]
            drawn, ids = base["negatives"][mine], base["negative_ids"][mine]
            own = query @ base["positives"][i] / 0.5 - log_q * (own_id in earlier_ids[past])
            others = np.concatenate(
                [
                    (drawn @ query / 0.5)[ids != own_id],
                    (earlier[past] @ query / 0.5 - log_q)[earlier_ids[past] != own_id],
                ]
            )
            np.testing.assert_allclose(
                found[i], np.logaddexp.reduce([own, *others]) - own, rtol=1e-6, atol=1e-12
            )


def test_what_samples_look_back_at_needs_ids_and_offsets_need_groups():
    x = tf.ones([2, 3])
    given_ = {"negatives": x, "negative_ids": [3, 4]}
    with pytest.raises(ConfigError, match="earlier and earlier_ids belong together"):
        SampledSoftmax()(x, x, [1, 2], **given_, earlier=Jagged(x, tf.constant([0, 2])))
    with pytest.raises(ConfigError, match="offsets assign samples to groups"):
        SampledSoftmax()(x, x, [1, 2], **given_, offsets=[0, 2])
