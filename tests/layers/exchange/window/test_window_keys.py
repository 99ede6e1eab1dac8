"""The classes of a table's keys: by the first and the last micro-batch that looks them up."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gmeta.layers import EmbeddingCollection, FeatureConfig, TableConfig
from gmeta.layers.exchange.window_keys import key_classes, request_window

LAYER = EmbeddingCollection(
    [FeatureConfig("narrow", TableConfig("narrow", 2)), FeatureConfig("wide", TableConfig("wide", 3))]
)
KEYS = st.lists(st.integers(0, 12), max_size=9)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 5).flatmap(lambda n: st.lists(st.tuples(KEYS, KEYS), min_size=n, max_size=n)))
def test_keys_are_divided_by_their_first_and_last_use_and_found_again(parts):
    asked = [[tf.constant(keys, tf.int64) for keys in of_part] for of_part in parts]
    found = request_window(LAYER.fetch, asked)
    classes = key_classes(len(parts))
    for table in range(2):
        uses = [of_part[table] for of_part in parts]
        expected = {}
        for key in {key for keys in uses for key in keys}:
            when = [number for number, keys in enumerate(uses) if key in keys]
            expected[key] = (when[0], when[-1])
        given_ = [keys.numpy().tolist() for keys in found.keys[table]]
        assert {key: classes[number] for number, keys in enumerate(given_) for key in keys} == expected
        assert sorted(key for keys in given_ for key in keys) == sorted(expected)  # each once
        assert sorted(found.owned[table].numpy().tolist()) == sorted(expected)
        for number, keys in enumerate(uses):
            at_hand = [
                key for each, own in zip(classes, given_, strict=True) if each.is_open(number) for key in own
            ]
            places = found.places[number][table].numpy()
            assert np.array(at_hand, np.int64)[places].tolist() == keys
