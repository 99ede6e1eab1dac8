"""Histories are read whole, cut so that nothing that is asked is trained on, and renumbered."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError, DataError
from gmeta.experiment.next_item.histories import core, cut, first_of_each
from gmeta.experiment.plan.next_item_config import PROTOCOLS
from support.next_item import histories


def lists(found):
    return [
        found.items[a:b].tolist() for a, b in zip(found.row_splits[:-1], found.row_splits[1:], strict=True)
    ]


SEQUENCES = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=8), min_size=1, max_size=8)


@given(SEQUENCES, st.data())
def test_parts_are_those_of_lists(sequences, data):
    found = histories(sequences)
    count = np.array([data.draw(st.integers(0, len(each) + 1)) for each in sequences])
    assert lists(found.first(count)) == [each[:n] for each, n in zip(sequences, count, strict=True)]
    assert lists(found.after(count)) == [each[n:] for each, n in zip(sequences, count, strict=True)]
    chosen = data.draw(st.lists(st.integers(0, len(sequences) - 1)))
    assert lists(found.choose(np.array(chosen, np.int64))) == [sequences[n] for n in chosen]
    assert found.place.tolist() == [n for each in sequences for n in range(len(each))]
    assert found.from_end.tolist() == [n for each in sequences for n in reversed(range(len(each)))]


def test_the_last_item_is_asked_in_the_test_and_the_one_before_it_in_validation():
    cuts = cut(histories([[4, 2, 4, 2], [2, 4, 2], [4, 2]]), np.array([11, 12, 13, 14, 15]), "leave-last-out")
    assert cuts.ids.tolist() == [13, 15]
    assert lists(cuts.train) == [[1, 0], [0], [1, 0]]  # a short history is trained on whole
    assert (lists(cuts.validation.histories), lists(cuts.validation.targets)) == ([[1, 0], [0]], [[1], [1]])
    assert (lists(cuts.test.histories), lists(cuts.test.targets)) == ([[1, 0, 1], [0, 1]], [[0], [0]])
    assert lists(cuts.whole) == [[1, 0, 1, 0], [0, 1, 0], [1, 0]]


def test_an_item_that_training_lacks_is_asked_as_minus_one_and_read_by_nobody():
    cuts = cut(histories([[0, 1, 2, 0], [0, 1, 0, 1]]), np.arange(3), "leave-last-out")
    assert lists(cuts.validation.targets) == [[-1], [0]]
    assert lists(cuts.test.histories) == [[0, 1], [0, 1, 0]]


def test_by_time_all_that_came_later_is_asked():
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 5, 40).tolist() for _ in range(6)]
    times = np.concatenate([np.sort(rng.integers(0, 1000, 40)) for _ in sequences])
    found = histories(sequences, times)
    cuts = cut(found, np.arange(5), "time")
    begin, end = np.quantile(times, [0.8, 0.9], method="higher")
    assert len(cuts.train.items) == (times < begin).sum()
    assert cuts.train.times.max() < cuts.validation.targets.times.min() == begin
    assert cuts.validation.targets.times.max() < cuts.test.targets.times.min() == end
    assert cuts.validation.targets.sizes.max() > 1
    assert len(cuts.test.targets.items) == (times >= end).sum()
    with pytest.raises(ConfigError, match="--time"):
        cut(histories(sequences), np.arange(5), "time")


def test_of_users_held_out_nothing_is_trained_on():
    sequences = [[0, 1, 2], *([n % 3, (n + 1) % 3, 2, 0] for n in range(29))]
    cuts = cut(histories(sequences), np.arange(3), "users")
    parts = [set(part.users) for part in (cuts.train, cuts.validation.histories, cuts.test.histories)]
    assert [len(part) for part in parts] == [24, 3, 3]
    assert len(set.union(*parts)) == 30
    assert (cuts.test.targets.sizes == 1).all()


def recbole_counts(total):
    """`Dataset._calcu_split_ids` of RecBole 1.2, of the ratios 8:1:1."""
    ratios = [0.8, 0.1, 0.1]
    count = [int(ratio * total) for ratio in ratios]
    count[0] = total - sum(count[1:])
    for place in range(1, len(ratios)):
        if count[0] <= 1:
            break
        if 0 < ratios[-place] * total < 1:
            count[-place] += 1
            count[0] -= 1
    return count


def test_at_random_each_users_numbers_are_those_of_recbole():
    sizes = [*range(1, 42), 99, 100, 101]
    found = histories([list(range(size)) for size in sizes])
    cuts = cut(found, np.arange(101), "random", seed=3)
    known = np.zeros(101, bool)
    known[cuts.ids] = True
    validation, test = (
        dict(
            zip(
                part.targets.users.tolist(),
                zip(lists(part.histories), lists(part.targets), strict=True),
                strict=True,
            )
        )
        for part in (cuts.validation, cuts.test)
    )
    for user, train in zip(found.users.tolist(), lists(cuts.train), strict=True):
        size = sizes[user // 10]
        read, wanted = validation.get(user, ([], []))
        read_in_test, wanted_in_test = test.get(user, ([], []))
        assert [len(train), len(wanted), len(wanted_in_test)] == recbole_counts(size)
        if wanted:
            assert read == train
        if wanted_in_test:  # the history is all the rest, in its order
            kept = cuts.ids[train].tolist()
            rest = {each for each in range(size) if known[each]} - set(
                cuts.ids[[i for i in wanted_in_test if i >= 0]]
            )
            assert set(cuts.ids[read_in_test]) == rest
            assert kept == sorted(kept)
    other = cut(found, np.arange(101), "random", seed=4)
    assert lists(other.train)[-1] != lists(cuts.train)[-1]


@given(SEQUENCES)
def test_of_a_set_the_first_of_equal_items_is_kept(sequences):
    assert lists(first_of_each(histories(sequences))) == [list(dict.fromkeys(each)) for each in sequences]


@given(SEQUENCES, st.integers(1, 4), st.integers(1, 4))
def test_in_a_core_every_user_and_item_has_enough_and_no_larger_part_does(sequences, users, items):
    try:
        found, ids = core(histories(sequences), np.arange(10), users, items)
    except DataError:
        found, ids = None, np.zeros(0, int)
    else:
        assert found.sizes.min() >= users
        assert np.bincount(found.items).min() >= items
    kept = [list(each) for each in sequences]
    while True:  # one by one, in another order
        counts = np.bincount(np.array([n for each in kept for n in each], int), minlength=10)
        rare = next((n for n in range(10) if 0 < counts[n] < items), None)
        if rare is not None:
            kept = [[n for n in each if n != rare] for each in kept]
        elif any(0 < len(each) < users for each in kept):
            kept = [[] if 0 < len(each) < users else each for each in kept]
        else:
            break
    kept = [each for each in kept if each]
    assert kept == ([] if found is None else [[int(ids[n]) for n in each] for each in lists(found)])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_too_little_data_is_one_line(protocol):
    found = histories([[0]], np.array([1]))
    with pytest.raises(DataError, match="events to train on"):
        cut(found, np.arange(1), protocol)
