from __future__ import annotations

import re

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.ops.device import why_no_gpu
from gmeta.ops.id_hash import merge_keys
from gmeta.ops.table.portable_tables import portable_ops
from support.reference import table

IDS = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 2**61 - 1)), max_size=6)
NUMBERS = st.one_of(st.integers(0, 9), st.integers(-(2**63), 2**63 - 1))
BAD = st.one_of(st.integers(-(2**63), -1), st.integers(2**61, 2**63 - 1))


@pytest.fixture(scope="module", params=["cpu", "gpu"])
def device(request):
    """Where keys are computed."""
    if request.param == "gpu" and why_no_gpu():
        pytest.skip(why_no_gpu())
    return request.param


def both(ids, bits=61, **more):
    """The native op's arguments and the reference's: features "f0", "f1", … of tables 0, 1, …"""
    count = len(ids)
    settings = {
        "features": [f"f{i}" for i in range(count)],
        "prefixes": [i << bits for i in range(count)],
        "id_bits": bits,
        **more,
    }
    return [np.array(values, np.int64) for values in ids], settings


@given(ids=st.lists(IDS, min_size=1, max_size=3))
def test_it_equals_its_reference(device, ids):
    ids, settings = both(ids)
    found = merge_keys(ids, **settings, device=device)
    np.testing.assert_array_equal(found, table.merge_keys(ids, **settings))


@given(ids=st.lists(IDS, min_size=1, max_size=3))
def test_so_does_its_portable_form(ids):
    ids, settings = both(ids)
    with portable_ops():
        np.testing.assert_array_equal(merge_keys(ids, **settings), table.merge_keys(ids, **settings))


@given(ids=st.lists(NUMBERS, max_size=6), fits=IDS, bits=st.integers(56, 61), mix=st.booleans())
def test_hashed_numbers_are_folded_in_every_form(device, ids, fits, bits, mix):
    fits = [each % 2**bits for each in fits]
    ids, settings = both([ids, fits, ids[::-1]], bits, hashed=[True, False, True], mix=mix)
    expected = table.merge_keys(ids, **settings)
    np.testing.assert_array_equal(merge_keys(ids, **settings, device=device), expected)
    given_mix = {name: value for name, value in settings.items() if name != "mix"}
    in_graph = tf.function(lambda mix: merge_keys(ids, **given_mix, mix=mix, device=device))
    np.testing.assert_array_equal(in_graph(tf.constant(mix)), expected)
    with portable_ops():
        np.testing.assert_array_equal(merge_keys(ids, **settings), expected)


def test_ids_that_do_not_fit_beside_the_prefix_are_refused():
    ids, settings = both([[1 << 60]], bits=55, hashed=[True])
    with pytest.raises(tf.errors.InvalidArgumentError, match="ids of 56 bits don't fit into 55"):
        merge_keys(ids, **settings)


@given(bad=BAD)
def test_the_portable_form_names_feature_and_limit(bad):
    ids, settings = both([[1], [2, bad]])
    with (
        portable_ops(),
        pytest.raises(tf.errors.InvalidArgumentError, match=rf"feature f1: ids must be in \[0, {1 << 61}\)"),
    ):
        merge_keys(ids, **settings)


@given(ids=st.lists(IDS, min_size=1, max_size=3), bad=BAD, data=st.data())
def test_an_id_out_of_range_is_named_as_in_the_reference(device, ids, bad, data):
    where = data.draw(st.integers(0, len(ids) - 1))
    ids[where].insert(data.draw(st.integers(0, len(ids[where]))), bad)
    ids, settings = both(ids)
    with pytest.raises(ValueError, match=rf"feature 'f{where}': id {bad} at position \d+ of") as expected:
        table.merge_keys(ids, **settings)
    with pytest.raises(tf.errors.InvalidArgumentError, match=re.escape(str(expected.value))):
        merge_keys(ids, **settings, device=device)


def test_int32_ids_are_taken_as_they_are(device):
    (wide, _), settings = both([[3, 2**31 - 1], []])
    mixed = [tf.constant(wide, tf.int32), tf.constant([5], tf.int64)]
    assert merge_keys(mixed, **settings, device=device).numpy().tolist() == [3, 2**31 - 1, (1 << 61) + 5]
    with pytest.raises(tf.errors.InvalidArgumentError, match="feature 'f0': id -2 at position 0 of 1"):
        merge_keys([tf.constant([-2]), tf.constant([5])], **settings, device=device)


def test_what_are_no_ids_is_refused():
    with pytest.raises(ConfigError, match="feature 'age': ids must be integers"):
        merge_keys([[0.5]], features=["age"], prefixes=[0], id_bits=62)
    with pytest.raises(ConfigError, match="at least one feature"):
        merge_keys([], features=[], prefixes=[], id_bits=62)
