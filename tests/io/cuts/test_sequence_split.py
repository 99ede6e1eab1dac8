"""Groups cut into sequences, against plain Python."""

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.io import After, Flag
from gmeta.io.cuts.sequence_split import SequenceSplit
from support.drawn_batches import plain

PARTS = {"history": ["item", "tags"], "targets": ["price", "tags"], "labels": ["click", "price"]}
CONTEXTS = ["user", "price", "tags"]


def drawn_element(sizes, seed, first=0):
    """Groups of these sizes, of users from ``first`` on."""
    random, rows = np.random.default_rng(seed), sum(sizes)
    tags = tf.RaggedTensor.from_row_lengths(random.random(6, np.float32), tf.constant([3, 0, 2, 1], tf.int64))
    columns = {
        "item": tf.constant(random.integers(0, 99, rows)),
        "price": tf.constant(random.integers(0, 9, rows), tf.float32),
        "click": tf.constant(random.integers(0, 2, rows)),
        "shown": tf.constant(random.integers(-1, 2, rows)),
        "bought": tf.constant(random.integers(0, 2, rows)),
        "tags": tf.gather(tags, random.integers(0, 4, rows)),
    }
    users = tf.range(first, first + len(sizes), dtype=tf.int64)
    splits = tf.constant([0, *itertools.accumulate(sizes)], tf.int64)
    return {"task": users, "batch_id": 0 * users, "row_splits": splits, "columns": columns}


def exposures(rule, rows):
    """Which rows are exposures, in plain Python."""
    if isinstance(rule, After):
        return [row[rule.column] >= rule.time for row in rows]
    if isinstance(rule, Flag):
        return [row[rule.column] != 0 for row in rows]
    count = rule or 0
    if isinstance(rule, float):
        count = max(1, min(math.floor(rule * len(rows) + 0.5), len(rows) - 1))
    return [place >= len(rows) - count for place in range(len(rows))]


def reference(element, exposed, history_of, longest, unexposed):
    """The batch, as nested lists, in plain Python."""
    columns, splits = plain(element["columns"]), plain(element["row_splits"])
    users = []
    for user, begin, end in zip(plain(element["task"]), splits[:-1], splits[1:], strict=True):
        rows = [{name: values[row] for name, values in columns.items()} for row in range(begin, end)]
        shown = exposures(exposed, rows)
        events = [r for r, s in zip(rows, shown, strict=True) if not s and (not history_of or r["bought"])]
        targets = [r for r, s in zip(rows, shown, strict=True) if s]
        if targets or exposed is None or unexposed == "keep":
            users.append(({**rows[0], "user": user}, events[-(longest or len(rows)) :], targets))
    of_part = {"history": 1, "targets": 2, "labels": 2}
    return {
        "task": [user[0]["user"] for user in users],
        "contexts": {name: [user[0][name] for user in users] for name in CONTEXTS},
        **{
            part: {name: [[row[name] for row in user[place]] for user in users] for name in PARTS[part]}
            for part, place in of_part.items()
        },
    }


RULES = st.one_of(
    st.integers(1, 3),
    st.floats(0.01, 0.99),
    st.builds(After, st.just("price"), st.sampled_from([2, 6.5, 8])),
    st.just(Flag("shown")),
)


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 6), max_size=5),
    exposed=RULES,
    history_of=st.sampled_from([None, Flag("bought")]),
    longest=st.sampled_from([None, 1, 3]),
    unexposed=st.sampled_from(["leave_out", "keep"]),
    seed=st.integers(0, 2**32),
)
def test_batches_are_the_reference_s(sizes, exposed, history_of, longest, unexposed, seed):
    rule = {"exposed": exposed, "history_of": history_of, "longest": longest, "unexposed": unexposed}
    split = SequenceSplit(**PARTS, contexts=CONTEXTS, task="user", **rule)
    element = drawn_element(sizes, seed)
    expected = reference(element, **rule)
    assert plain(split(element)) == expected


def test_without_exposures_all_rows_are_history():
    element, split = drawn_element([3, 1, 4], 0), SequenceSplit(history=["item"])
    found = split(element)
    assert found["targets"] == found["labels"] == found["contexts"] == {}
    expected = tf.RaggedTensor.from_row_splits(element["columns"]["item"], element["row_splits"])
    assert plain(found["history"]["item"]) == plain(expected)
    assert found["history"]["item"].row_splits.dtype == tf.int64


def test_labels_are_float32_and_lists_are_ragged_twice():
    split = SequenceSplit(**PARTS, contexts=CONTEXTS, task="user", exposed=1)
    batch = split(drawn_element([3, 2], 0))
    assert {values.dtype for values in batch["labels"].values()} == {tf.float32}
    assert batch["history"]["tags"].shape.as_list() == [2, None, None]
    assert batch["contexts"]["tags"].shape.as_list() == [2, None]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "name columns in contexts, history or targets"),
        ({"history": "item"}, "history must be a list of columns, each once; got 'item'"),
        ({"history": ["item", "item"]}, "each once"),
        ({"history": ["item"], "labels": ["click"]}, "define these rows by exposed"),
        ({"history": ["item"], "longest": 0}, "longest must be a whole number from 1 on, got 0"),
        ({"history": ["item"], "history_of": 3}, "history_of must be a Flag, got 3"),
        ({"history": ["item"], "unexposed": "drop"}, "must be one of leave_out, keep, got 'drop'"),
        ({"history": ["itme"]}, "no column 'itme'; it has user, batch_id, item, price"),
        ({"history": ["user"]}, "history names the key 'user'; it may be one of contexts"),
        ({"contexts": ["batch_id"]}, "contexts names the key 'batch_id'"),
        ({"targets": ["item"], "labels": ["tags"], "exposed": 1}, "labels .* 'tags' is a list"),
        ({"targets": ["item"], "exposed": 1.5}, "sequences: exposed=1.5 must be at least 1 row"),
        ({"targets": ["item"], "exposed": Flag("price")}, "exposed=.* must name an int64 column"),
        ({"history": ["item"], "history_of": Flag("tags")}, "history_of=.* must name an int64 column"),
    ],
)
def test_arguments_that_make_no_sense(options, says):
    with pytest.raises(ConfigError, match=says):
        SequenceSplit(**options, task="user")(drawn_element([3, 2], 0))
