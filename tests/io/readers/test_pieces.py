"""Pieces of an epoch, and what is left of them after some elements: together, they are the epoch."""

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.core.shares import Shares
from gmeta.io import Balance, ReadOptions, groups, rows, sequences, tasks
from gmeta.io.readers.read_options import OneEpoch
from support.grouped_data import write_folder

OPTIONS = ReadOptions(shard=(0, 1), seed=4, shuffle_buffer=8)
SIZES = ([3, 2, 4, 2, 6] * 3, [2, 5, 3] * 4)
GROUPS = sum(map(len, SIZES))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("data"), *SIZES)


@settings(deadline=None, max_examples=5)
@given(pieces=st.integers(1, 9), size=st.integers(1, 6), data=st.data())
def test_pieces_joined_are_the_epoch(prepared, pieces, size, data):
    def read(start):
        return [
            (e["task"].numpy().tolist(), e["cursor"].numpy().tolist())
            for e in groups(prepared, groups_per_element=size, start=start, options=OPTIONS)
        ]

    parts = [read(OneEpoch(3, number, pieces)) for number in range(pieces)]
    assert list(chain(*parts)) == read(OneEpoch(3))
    number = max(range(pieces), key=lambda one: len(parts[one]))
    taken = data.draw(st.integers(0, len(parts[number]) + 1))
    assert read(OneEpoch(3, number, pieces, taken)) == parts[number][taken:]


@pytest.mark.parametrize(
    "reader",
    [
        lambda path, start: rows(path, batch_size=4, start=start, options=OPTIONS).map(
            lambda x, _: x["task"]
        ),
        lambda path, start: groups(path, balance=Balance(9), start=start, options=OPTIONS).map(
            lambda e: e["task"]
        ),
        lambda path, start: tasks(
            path, query=1, tasks_per_batch=2, features=["task"], start=start, options=OPTIONS
        ).map(lambda e: e["features"]["task"]),
        lambda path, start: sequences(
            path, history=["item"], sequences_per_batch=2, start=start, options=OPTIONS
        ).map(lambda e: e["task"]),
    ],
    ids=["rows", "balance", "tasks", "sequences"],
)
@pytest.mark.shown_by(case="balance")
def test_every_reader_reads_pieces_and_what_is_left_of_them(prepared, reader):
    def read(start):
        return [e.numpy().tolist() for e in reader(prepared, start)]

    parts = [read(OneEpoch(1, number, 3)) for number in range(3)]
    assert sorted(chain(*chain(*parts))) == sorted(chain(*read(OneEpoch(1))))
    assert all(parts)
    for taken in range(len(parts[1]) + 1):
        assert read(OneEpoch(1, 1, 3, taken)) == parts[1][taken:]


def test_a_piece_names_the_shares_of_the_rank_that_asked(prepared):
    def read(shard, shares):
        options = ReadOptions(shuffle=False, shard=shard)
        found = groups(prepared, start=OneEpoch(shares=shares), options=options)
        return list(chain(*(e["task"].numpy().tolist() for e in found)))

    assert read(None, Shares(1, 1, 3)) == [*range(9, 18)]
    assert read((2, 3), Shares(1, 1, 3)) == [*range(18, 27)]


def test_pieces_that_make_no_sense(prepared):
    with pytest.raises(ConfigError, match="pieces must be a whole number from 1 on, got 0"):
        OneEpoch(pieces=0)
    with pytest.raises(ConfigError, match=r"number=2 must be below pieces=2: they count from 0"):
        OneEpoch(number=2, pieces=2)
    with pytest.raises(ConfigError, match="would lose the last rows of every piece"):
        rows(prepared, drop_remainder=True, start=OneEpoch(pieces=2))
