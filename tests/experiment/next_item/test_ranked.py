"""Ranks and metrics of ranked catalogues are those of loops; the blend finds what predicts."""

import functools
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from gmeta.experiment.next_item.blend import SEEN, Blend, scores_of_all
from gmeta.experiment.next_item.counting import Pairs
from gmeta.experiment.next_item.histories import Asked
from gmeta.experiment.next_item.ranked import interval, ndcg, rank, rank_all, top
from support.next_item import Fixed, histories

ITEMS = 6


@st.composite
def asked(draw):
    users = draw(st.integers(1, 4))
    read = [draw(st.lists(st.integers(0, ITEMS - 1), min_size=1, max_size=4)) for _ in range(users)]
    targets = [
        draw(st.lists(st.integers(-1, ITEMS - 1), min_size=1, max_size=4, unique=True)) for _ in range(users)
    ]
    scores = [[draw(st.integers(0, 3)) for _ in range(ITEMS)] for _ in range(users)]
    return read, targets, np.array(scores, np.float32)


@given(asked(), st.booleans(), st.sampled_from([1, 2, 5]))
def test_metrics_are_those_of_loops(drawn, seen, k):
    read, targets, scores = drawn
    found = rank(Fixed(scores), Asked(histories(read), histories(targets)), ITEMS, seen=seen, shown=k)
    own = found.of_users(k)
    for user, (history, wanted) in enumerate(zip(read, targets, strict=True)):
        allowed = [item for item in range(ITEMS) if seen or item not in history]
        ranks = sorted(
            sum(scores[user, other] >= scores[user, item] for other in allowed) if item in allowed else np.inf
            for item in wanted
        )
        hits = [r for r in ranks if r <= k]
        best = sum(1 / np.log2(n + 2) for n in range(min(len(wanted), k)))
        expected = {
            "hr": float(bool(hits)),
            "recall": len(hits) / len(wanted),
            "precision": len(hits) / k,
            "ndcg": sum(1 / np.log2(r + 1) for r in hits) / best,
            "map": sum((n + 1) / r for n, r in enumerate(hits)) / min(len(wanted), k),
            "mrr": 1 / ranks[0],
        }
        assert {name: pytest.approx(value) for name, value in expected.items()} == {
            name: values[user] for name, values in own.items()
        }
        shown = [item for item in found.shown[user].tolist() if item >= 0]
        order = sorted(allowed, key=lambda item: (-scores[user, item], item))
        assert sorted(scores[user, shown].tolist()) == sorted(scores[user, order[: min(k, ITEMS)]].tolist())
        assert set(shown) <= set(allowed)


@given(asked(), st.booleans(), st.sampled_from([1, 2, 5]), st.sampled_from([0.0, 1.0]))
def test_sparse_sums_give_the_ndcg_of_dense_scores(drawn, seen, k, decay):
    read, targets, _ = drawn
    part = Asked(histories(read), histories(targets))
    matrix = np.random.default_rng(0).integers(0, 3, (ITEMS, ITEMS)).astype(np.float32)
    pairs = Pairs(sparse.csr_matrix(matrix), 0, decay)
    found = ndcg(pairs, part, ITEMS, seen=seen, k=k)
    by_scores = ndcg(Fixed(pairs.scores(part.histories)), part, ITEMS, seen=seen, k=k)
    assert found == pytest.approx(by_scores)


@given(asked(), st.lists(st.booleans(), min_size=1, max_size=2, unique=True))
def test_scorers_are_ranked_together_as_alone(drawn, seen):
    """A blend and its members, in one call, which asks each member once."""
    read, targets, scores = drawn
    part = Asked(histories(read), histories(targets))
    one, other = Counted(Fixed(scores)), Counted(Fixed(scores[:, ::-1]))
    blend = Blend(["one", "other", SEEN], *np.array([[1, 2, 3], [0, 1, 0], [1, 2, 1.0]])).of(
        {"one": one, "other": other}
    )
    scorers = {"blend": blend, "one": one}
    found = rank_all(functools.partial(scores_of_all, scorers), part, ITEMS, seen=seen, shown=2, width=2)
    assert one.asked == other.asked == 1
    for each, name in itertools.product(seen, scorers):
        alone = rank(scorers[name], part, ITEMS, seen=each, shown=2)
        np.testing.assert_array_equal(found[each][name].ranks, alone.ranks)
        np.testing.assert_array_equal(found[each][name].shown, alone.shown)


class Counted:
    """A scorer that counts how often it is asked."""

    def __init__(self, scorer):
        self.scorer, self.asked = scorer, 0

    def scores(self, histories):
        self.asked += 1
        return self.scorer.scores(histories)


def test_a_table_describes_what_is_shown():
    scores = np.array([[5, 4, 3, 2, 1, 0.0], [5, 4, 3, 2, 1, 0.0]], np.float32)
    found = rank(
        Fixed(scores), Asked(histories([[0], [1]]), histories([[1], [0]])), ITEMS, seen=False, shown=2
    )
    metrics = found.metrics([2], np.array([14, 1, 1, 1, 1, 0]))
    assert metrics["hr@2"] == metrics["mrr"] == 1.0
    assert metrics["coverage"] == 3 / 6  # 1 and 2, 0 and 2
    assert metrics["popular"] == 1 / 4
    shares = np.array([15, 2, 2]) / 24
    assert metrics["novelty"] == pytest.approx(-np.log2(shares[[1, 2, 0, 2]]).mean())


def test_what_is_left_out_is_not_shown():
    assert top(np.array([[1.0, -np.inf, 2.0]], np.float32), 3).tolist() == [[2, 0, -1]]


def test_an_interval_holds_the_difference_and_narrows():
    rng = np.random.default_rng(0)
    one = rng.random(4000)
    mean, low, high = interval(one + 0.1, one + rng.normal(0, 0.1, 4000))
    assert low < mean < high
    assert mean == pytest.approx(0.1, abs=0.01)
    assert high - low == pytest.approx(2 * 1.96 * 0.1 / np.sqrt(4000), rel=0.15)


def test_the_blend_weighs_what_predicts_and_forgets_what_does_not():
    rng = np.random.default_rng(0)
    users, items = 400, 30
    signal, other, noise = (rng.normal(size=(users, items)).astype(np.float32) for _ in range(3))
    logits = 2.0 * signal + 1.0 * other
    gumbel = rng.gumbel(size=logits.shape)
    targets = (logits + gumbel).argmax(axis=1)
    part = Asked(histories([[0]] * users), histories([[each] for each in targets.tolist()]))
    scorers = {"signal": Fixed(signal), "other": Fixed(5 * other + 3), "noise": Fixed(noise)}
    blend = Blend.fit(scorers, part, items)
    weights = dict(zip(blend.names, blend.weights, strict=True))
    assert weights["signal"] == pytest.approx(2.0, rel=0.15)  # of a feature of deviation 1
    assert weights["other"] == pytest.approx(1.0, rel=0.2)
    assert abs(weights["noise"]) < 0.2
    again = Blend.from_json(blend.to_json())
    scores = again.of(scorers).scores(part.histories)
    np.testing.assert_array_equal(scores, blend.of(scorers).scores(part.histories))
    expected = sum(
        weight * (scorers[name].values - mean) / deviation
        for name, weight, mean, deviation in blend.rows()
        if name != SEEN
    )
    expected[:, 0] += blend.weights[-1] / blend.deviations[-1]  # all have item 0
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-4)


def test_of_sets_the_blend_orders_what_scorers_rank_first_and_asks_for_nothing_seen():
    rng = np.random.default_rng(0)
    users, items = 300, 80
    signal, noise = (rng.normal(size=(users, items)).astype(np.float32) for _ in range(2))
    gumbel = rng.gumbel(size=signal.shape)
    order = np.argsort(-(2.0 * signal + gumbel), axis=1)
    # Where it is low, the signal is turned around: a likelihood over all items would weigh it less.
    given = np.where(signal > 0, signal, -4 - signal).astype(np.float32)
    part = Asked(histories(order[:, :3].tolist()), histories(order[:, 3:6].tolist()))
    scorers = {"signal": Fixed(given), "noise": Fixed(noise)}
    first = Blend.fit(scorers, part, items, sets=True)
    weights = dict(zip(first.names, first.weights, strict=True))
    assert weights["signal"] > 0.5
    assert abs(weights["noise"]) < 0.2
    assert weights[SEEN] == pytest.approx(0.0, abs=1e-6)
    ndcg = rank(first.of(scorers), part, items, seen=False, shown=10).of_users(10)["ndcg"].mean()
    drawn = Blend.fit(scorers, part, items)
    assert (
        ndcg >= rank(drawn.of(scorers), part, items, seen=False, shown=10).of_users(10)["ndcg"].mean() - 0.01
    )
    again = Blend.from_json(first.to_json()).of(scorers).scores(part.histories)
    np.testing.assert_array_equal(again, first.of(scorers).scores(part.histories))
