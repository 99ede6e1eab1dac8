"""Ids of several tables become keys of one, and ids again."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from gmeta.core.merged_tables import MergedKeys


@given(tables=st.integers(1, 70), fold=st.sampled_from(["mix", "xor"]), data=st.data())
def test_each_key_is_of_one_table_and_gives_its_id_back(tables, fold, data):
    names = tuple(map(str, range(tables)))
    merged = MergedKeys(names, names[::2], fold)
    ids = st.integers(0, 2**merged.id_bits - 1)
    pairs = data.draw(st.lists(st.tuples(st.sampled_from(names), ids), max_size=20))
    keys = np.array([merged.prefix_of(name) | number for name, number in pairs], np.int64)
    assert (keys >= 0).all()
    for name in names:
        own, found = merged.ids_of(name, keys)
        assert own.tolist() == [each == name for each, _ in pairs]
        assert found.tolist() == [number for each, number in pairs if each == name]
    assert MergedKeys.from_json(merged.to_json()) == merged


@pytest.mark.parametrize(
    "value", [{"tables": []}, {"tables": ["a", "a"]}, {"tables": ["a"], "hashed": ["b"]}, {"tables": "a"}]
)
def test_other_values_than_it_writes_are_refused(value):
    with pytest.raises(ValueError, match="tables"):
        MergedKeys.from_json(value)


def test_what_was_written_before_there_were_two_folds_means_the_first():
    before = {"tables": ["a", "b"], "hashed": ["b"]}
    assert MergedKeys.from_json(before) == MergedKeys(("a", "b"), ("b",), "xor")
    assert MergedKeys(("a", "b"), ("b",), "xor").to_json() == before
    assert MergedKeys(("a", "b"), ("b",)).to_json() == {**before, "fold": "mix"}
    with pytest.raises(ValueError, match="fold must be 'mix' or 'xor', got 'md5'"):
        MergedKeys.from_json({**before, "fold": "md5"})
