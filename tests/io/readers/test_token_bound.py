"""No batch has more than `max_tokens`: what is longer alone, or longer than was counted, is refused."""

import tempfile
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError, DataError
from gmeta.io import Balance, ReadOptions, SequenceCost, groups, sequences, tasks
from gmeta.io.reader_stats import data_errors
from support.grouped_data import write_folder

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=25)


def lengths_of(element):
    return np.diff(element["row_splits"].numpy())


@settings(max_examples=15)
@given(
    sizes=SIZES,
    max_tokens=st.integers(1, 60),
    longest=st.none() | st.integers(1, 40),
    quadratic=st.sampled_from([0.0, 0.1]),
    target=st.floats(1, 200),
    shuffle=st.booleans(),
)
def test_no_element_exceeds_it_or_the_group_that_would_is_named(
    sizes, max_tokens, longest, quadratic, target, shuffle
):
    counted = [min(size, longest or size) for size in sizes]
    balance = Balance(target, SequenceCost(1.0, quadratic), max_tokens, longest=longest)
    with tempfile.TemporaryDirectory() as folder:
        path = write_folder(Path(folder), sizes)
        elements = groups(path, balance=balance, options=ReadOptions(shuffle=shuffle))
        found = []
        try:
            with data_errors():
                found.extend(np.minimum(lengths_of(element), longest or 40) for element in elements)
        except DataError as error:
            assert max(counted) > max_tokens
            text = str(error)
            assert f"{path}: the group of task " in text
            assert f" tokens, and a batch may have max_tokens={max_tokens}; let longest= cut" in text
            task, tokens = (int(text.split(word)[1].split()[0]) for word in ("of task ", " has "))
            assert counted[task] == tokens > max_tokens
        else:
            assert max(counted) <= max_tokens
            assert sum(map(len, found)) == len(sizes)
        assert all(element.sum() <= max_tokens for element in found)


@settings(max_examples=10)
@given(sizes=SIZES, max_tokens=st.integers(1, 60))
@pytest.mark.shown_by("io/readers/test_groups.py::test_balancing_counts_the_values_of_a_list_column")
def test_values_of_a_list_column_are_bounded_too(sizes, max_tokens):
    with tempfile.TemporaryDirectory() as folder:
        path = write_folder(Path(folder), sizes)
        every = list(groups(path, options=ReadOptions(shuffle=False)))
        values = [len(group) for e in every for group in _genres(e)]
        balance = Balance(30.0, max_tokens=max_tokens, tokens="genre")
        elements = groups(path, balance=balance, options=ReadOptions(shuffle=False))
        if max(values) > max_tokens:
            with pytest.raises(DataError, match=f"max_tokens={max_tokens}"), data_errors():
                list(elements)
            return
        found = [sum(map(len, _genres(element))) for element in elements]
        assert sum(found) == sum(values)
        assert max(found) <= max_tokens


def _genres(element):
    rows = element["columns"]["genre"].to_list()
    splits = element["row_splits"].numpy()
    return [list(chain.from_iterable(rows[a:b])) for a, b in pairwise(splits)]


@settings(max_examples=4)
@given(sizes=SIZES, max_tokens=st.integers(5, 60), longest=st.integers(1, 12), exposed=st.integers(1, 4))
@pytest.mark.shown_by("test_no_element_exceeds_it_or_the_group_that_would_is_named")
def test_batches_of_sequences_have_no_more_events_and_exposures(sizes, max_tokens, longest, exposed):
    with tempfile.TemporaryDirectory() as folder:
        path = write_folder(Path(folder), sizes)

        def batches(of_balance):
            balance = Balance(20.0, max_tokens=max_tokens, longest=of_balance)
            parts = {"history": ["item"], "targets": ["item"], "labels": ["rating"], "exposed": exposed}
            return sequences(path, balance=balance, longest=longest, **parts)

        most = max(min(size, longest + exposed) for size in sizes)
        for of_balance in (longest + exposed, None):
            found = []
            try:
                with data_errors():
                    for batch in batches(of_balance):
                        found.append(sum(len(batch[part]["item"].values) for part in ("history", "targets")))
            except DataError as error:
                told = of_balance is None and "events and exposures" in str(error)
                assert told or most > max_tokens
            else:
                assert len(found) > 0
            assert all(tokens <= max_tokens for tokens in found)


def test_a_batch_longer_than_was_counted_is_refused(tmp_path):
    path = write_folder(tmp_path, [6, 6, 6])
    batches = sequences(
        path,
        history=["item"],
        targets=["item"],
        labels=["rating"],
        exposed=3,
        longest=3,
        balance=Balance(6.0, max_tokens=6),
    )
    with pytest.raises(DataError, match="a batch has 12 events and exposures, and may have"), data_errors():
        list(batches)


def test_tasks_are_bounded_too(tmp_path):
    path = write_folder(tmp_path, [4, 9, 4])
    read = tasks(path, query=2, label="rating", features=["item"], balance=Balance(8.0, max_tokens=8))
    with (
        pytest.raises(DataError, match="task 1 has 9 tokens, and a batch may have max_tokens=8"),
        data_errors(),
    ):
        list(read)


def test_a_balance_of_a_split_with_longer_groups_is_refused_at_once(tmp_path):
    path = write_folder(tmp_path, [4, 9], [11])
    with pytest.raises(
        ConfigError, match=r"2 of 3 groups of .* have more than max_tokens=8 tokens, up to 11: give longest=8"
    ):
        Balance.of(path, sequences=2, max_tokens=8)
    assert Balance.of(path, sequences=2, max_tokens=8, longest=8).max_tokens == 8


def test_an_index_of_another_data_set_bounds_nothing(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    path, other = write_folder(tmp_path / "a", [4, 9]), write_folder(tmp_path / "b", [4, 5])
    own, foreign = (next(Path(each).parent.glob("*.gidx")) for each in (path, other))
    own.write_bytes(foreign.read_bytes())
    with pytest.raises(DataError, match=r"gidx at byte \d+: it isn't the index that the manifest states"):
        Balance.of(path, sequences=2, max_tokens=8)


def test_columns_that_the_reader_refuses_are_left_to_it(tmp_path):
    path = write_folder(tmp_path, [4, 9])
    for column in ("rating", "gone"):
        with pytest.raises(Exception, match=f"token_column {column}|no column.*{column}"):
            list(groups(path, balance=Balance(9, max_tokens=99, tokens=column)))
