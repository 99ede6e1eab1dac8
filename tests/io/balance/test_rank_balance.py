"""Groups dealt out anew over ranks: nothing is lost, the order is kept, and costs are even."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core import collectives
from gmeta.core.errors import ConfigError
from gmeta.io.balance import SequenceCost
from gmeta.io.rank_balance import GroupPacking, _deal, balance_over_ranks, balanced_elements, rank_of_each
from support.process_ranks import run_ranks
from support.reference.balance import karmarkar_karp
from support.thread_ranks import run_thread_ranks, thread_alltoall

COST = SequenceCost(2.0, 1.0)


@given(
    costs=st.lists(st.integers(0, 5) | st.floats(0, 1e9), max_size=60),
    ranks=st.integers(1, 9),
)
def test_sequences_are_dealt_as_the_reference_deals_them(costs, ranks):
    rank_of = rank_of_each(tf.constant(costs, tf.float64), ranks).numpy()
    parts = [np.flatnonzero(rank_of == rank).tolist() for rank in range(ranks)]
    assert parts == karmarkar_karp(costs, ranks)


@pytest.mark.parametrize(
    ("costs", "ranks", "says"),
    [([1.0], 0, "at least one rank"), ([1.0, -2.0], 2, "sequence 1 is -2"), ([float("nan")], 2, "is nan")],
)
def test_costs_that_make_no_sense_are_refused(costs, ranks, says):
    with pytest.raises(tf.errors.InvalidArgumentError, match=says):
        rank_of_each(tf.constant(costs, tf.float64), ranks)


# What `gmeta.io.groups` adds to an element: the place of the rank's own reader.
PLACE = {"cursor": tf.constant([3], tf.int64), "epoch": tf.constant(0, tf.int64)}


def element_of(groups):
    """An element of groups (task, batch, rows); a row is (int, float, ints, floats)."""
    rows = [row for _, _, of_group in groups for row in of_group]

    def ragged(place, dtype):
        values = tf.constant([number for row in rows for number in row[place]], dtype)
        return tf.RaggedTensor.from_row_lengths(
            values, tf.constant([len(row[place]) for row in rows], tf.int64)
        )

    splits = [0, *itertools.accumulate(len(of_group) for _, _, of_group in groups)]
    return {
        "task": tf.constant([task for task, _, _ in groups], tf.int64),
        "batch_id": tf.constant([batch for _, batch, _ in groups], tf.int64),
        "row_splits": tf.constant(splits, tf.int64),
        "columns": {
            "item": tf.constant([row[0] for row in rows], tf.int64),
            "rating": tf.constant([row[1] for row in rows], tf.float32),
            "genres": ragged(2, tf.int64),
            "weights": ragged(3, tf.float32),
        },
    }


def groups_of(element):
    """The inverse of `element_of`."""
    columns = element["columns"]
    parts = [columns["item"].numpy().tolist(), columns["rating"].numpy().tolist()]
    parts += [columns["genres"].to_list(), columns["weights"].to_list()]
    rows, splits = list(zip(*parts, strict=True)), element["row_splits"].numpy().tolist()
    keys = [element[name].numpy().tolist() for name in ("task", "batch_id")]
    return [
        (task, batch, rows[begin:end])
        for task, batch, begin, end in zip(*keys, splits[:-1], splits[1:], strict=True)
    ]


def expected(of_ranks, cost, tokens):
    """What each rank gets, by the reference: its groups in the order of all ranks' groups."""
    groups = [group for of_rank in of_ranks for group in of_rank]
    costs = cost.of([tokens(group) for group in groups])
    return [[groups[number] for number in part] for part in karmarkar_karp(costs, len(of_ranks))]


def rows_of(group):
    return len(group[2])


def genres_of(group):
    return sum(len(row[2]) for row in group[2])


INTS, FLOATS = st.integers(-(2**63), 2**63 - 1), st.floats(width=32, allow_nan=False)
ROW = st.tuples(INTS, FLOATS, st.lists(INTS, max_size=3), st.lists(FLOATS, max_size=3))
GROUP = st.tuples(INTS, INTS, st.lists(ROW, max_size=4))
RANKS = st.lists(st.lists(GROUP, max_size=5), min_size=2, max_size=4)


def dealt_by_threads(of_ranks, length):
    """What ranks that are threads get."""

    def work(rank, gather):
        element = element_of(of_ranks[rank])
        packing = GroupPacking(element["columns"])
        exchange = thread_alltoall(rank, gather)
        found, groups = _deal(element, COST, length, packing, rank, len(of_ranks), exchange, "test")
        assert groups == sum(map(len, of_ranks))
        return found

    results = run_thread_ranks(len(of_ranks), work)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@settings(max_examples=30, deadline=None)
@given(of_ranks=RANKS, length=st.sampled_from([None, "genres"]))
def test_groups_go_where_the_reference_says_and_stay_what_they_are(of_ranks, length):
    found = dealt_by_threads(of_ranks, length)
    assert [groups_of(element) for element in found] == expected(
        of_ranks, COST, rows_of if length is None else genres_of
    )
    for element, original in zip(found, map(element_of, of_ranks), strict=True):
        assert tf.nest.map_structure(lambda t: t.dtype, element) == tf.nest.map_structure(
            lambda t: t.dtype, original
        )


def test_one_rank_keeps_its_element(monkeypatch):
    def refused(*_, **__):
        raise AssertionError("one rank exchanges nothing")

    monkeypatch.setattr(collectives, "alltoall", refused)
    element = element_of([(1, 0, [(5, 0.5, [1, 2], [])]), (2, 0, [])])
    for read in (element, {**element, **PLACE}):
        assert groups_of(balance_over_ranks(read, COST)) == groups_of(element)
        assert set(balance_over_ranks(read, COST)) == set(element)
    dataset = tf.data.Dataset.from_tensors({**element, **PLACE})
    assert [groups_of(e) for e in balanced_elements(dataset, COST, length="genres")] == [groups_of(element)]


def test_elements_of_another_form_are_refused():
    element = element_of([(1, 0, [(5, 0.5, [1], [])])])
    with pytest.raises(ConfigError, match=r"has batch_id, columns, row_splits, task, not"):
        balance_over_ranks({"features": element["columns"]}, COST)
    with pytest.raises(ConfigError, match="length='item' is no list column"):
        balance_over_ranks(element, COST, length="item")
    columns = {**element["columns"], "picture": tf.zeros([1, 3])}
    with pytest.raises(ConfigError, match=r"column 'picture' is float32 of shape \(1, 3\)"):
        balance_over_ranks({**element, "columns": columns}, COST)


def drawn(rank, step):
    """The groups that a rank reads in a step: of lengths of a long tail; none at times."""
    rng = np.random.default_rng([rank, step])
    count = [7, 0, 3][(rank + step) % 3]
    return [
        (
            10 * rank + number,
            step,
            [
                (int(rng.integers(99)), 0.5 * row, [row] * int(rng.integers(4)), [0.25] * (row % 2))
                for row in range(int(rng.lognormal(2, 0.9)))
            ],
        )
        for number in range(count)
    ]


def steps_on_ranks():
    """Runs on every rank: what it has after balancing, eagerly, in a function, and from a dataset."""
    here = collectives.world()
    eager = [groups_of(balance_over_ranks(element_of(drawn(here.rank, step)), COST)) for step in range(2)]
    own = [{**element_of(drawn(here.rank, step)), **PLACE} for step in range(2 + here.rank)]  # end one by one
    spec = {
        **{name: tf.TensorSpec(value.shape, value.dtype) for name, value in PLACE.items()},
        "task": tf.TensorSpec([None], tf.int64),
        "batch_id": tf.TensorSpec([None], tf.int64),
        "row_splits": tf.TensorSpec([None], tf.int64),
        "columns": {
            "item": tf.TensorSpec([None], tf.int64),
            "rating": tf.TensorSpec([None], tf.float32),
            "genres": tf.RaggedTensorSpec([None, None], tf.int64),
            "weights": tf.RaggedTensorSpec([None, None], tf.float32),
        },
    }
    dataset = tf.data.Dataset.from_generator(lambda: iter(own), output_signature=spec)
    with collectives.count_collectives() as counts:
        read = [groups_of(element) for element in balanced_elements(dataset, COST, length="genres")]
    left = balanced_elements(dataset, COST, length="genres")  # before its end, with an exchange under way
    assert groups_of(next(left)) == read[0]
    left.close()
    return eager, read, counts.calls


@pytest.mark.ranks
@pytest.mark.usefixtures("ranks_by")
def test_three_ranks_deal_their_groups_out():
    found = run_ranks(steps_on_ranks, 3)
    for step in range(2):
        of_ranks = [drawn(rank, step) for rank in range(3)]
        assert [eager[step] for eager, _, _ in found] == expected(of_ranks, COST, rows_of)
    for step in range(4):
        of_ranks = [drawn(rank, step) if step < 2 + rank else [] for rank in range(3)]
        assert [read[step] for _, read, _ in found] == expected(of_ranks, COST, genres_of)
    for _, read, calls in found:
        assert len(read) == 4
        assert calls == {"alltoall": 2 * 5}  # the fifth says that all have ended
