import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.initializers import Normal, Zeros
from gmeta.layers import FeatureConfig, TableConfig
from gmeta.layers.embedding.merge_plan import merge_tables
from gmeta.optimizers import SGD
from gmeta.policies import LRU, CountAdmission, TwoPrecisions


@given(
    features=st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from([4, 8]), st.sampled_from([Zeros(), Normal()])),
        min_size=1,
        max_size=20,
        unique_by=lambda feature: feature[0],
    ),
    data=st.data(),
)
def test_keys_of_a_merged_table_never_collide_and_fit_int64(features, data):
    configs = [
        FeatureConfig(f"f{n}", TableConfig(f"f{n}", dim, initializer=start)) for n, dim, start in features
    ]
    for merged in merge_tables(configs):
        m = len(merged.tables)
        assert merged.id_bits == 63 - math.ceil(math.log2(m + 1))
        seen = {}
        for feature in merged.features:
            for raw in {0, merged.id_limit - 1, data.draw(st.integers(0, merged.id_limit - 1))}:
                key = merged.key_prefix(feature) | raw
                assert 0 <= key < 2**63
                assert seen.setdefault(key, (feature.table.name, raw)) == (feature.table.name, raw)


def test_equal_widths_and_starts_merge_and_others_do_not():
    plan = merge_tables(
        [
            FeatureConfig("a", TableConfig("a", 8, initializer=Zeros())),
            FeatureConfig("b", TableConfig("b", 4, initializer=Zeros())),
            FeatureConfig("c", TableConfig("c", 8, initializer=Normal())),
            FeatureConfig("d", TableConfig("d", 8, initializer=Zeros())),
        ]
    )
    assert [merged.tables for merged in plan] == [("a", "d"), ("b",), ("c",)]


def test_policies_keep_tables_apart():
    counted, bounded = CountAdmission(3), LRU(max_rows=100)
    plan = merge_tables(
        [
            FeatureConfig("a", dim=8),
            FeatureConfig("b", TableConfig("b", 8, admission=counted)),
            FeatureConfig("c", TableConfig("c", 8, admission=CountAdmission(3))),
            FeatureConfig("d", TableConfig("d", 8, eviction=bounded)),
            FeatureConfig("e", TableConfig("e", 8, admission=counted, eviction=bounded)),
            FeatureConfig("f", TableConfig("f", 8, eviction=LRU(max_rows=100))),
            FeatureConfig("g", TableConfig("g", 8, eviction=LRU(max_rows=101))),
            FeatureConfig("h", TableConfig("h", 8, precision=TwoPrecisions(5))),
            FeatureConfig("i", TableConfig("i", 8, precision=TwoPrecisions(6))),
            FeatureConfig("j", TableConfig("j", 8, precision=TwoPrecisions(5))),
        ]
    )
    tables = [("a",), ("b", "c"), ("d", "f"), ("e",), ("g",), ("h", "j"), ("i",)]
    assert [merged.tables for merged in plan] == tables
    assert plan[3].policy.admission == counted
    assert plan[3].policy.eviction == bounded


def test_features_that_name_one_table_share_its_keys():
    item = FeatureConfig("item", dim=8)
    history = FeatureConfig("history", TableConfig("item", 8), combiner="mean")
    (merged,) = merge_tables([item, history])
    assert merged.tables == ("item",)
    assert merged.key_prefix(item) == merged.key_prefix(history)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([], "at least one feature"),
        (["item"], r"must be gmeta\.layers\.FeatureConfig\(name, dim=...\), got 'item'"),
        ([FeatureConfig("a", dim=8), FeatureConfig("a", dim=8)], "named twice: a"),
        ([FeatureConfig("a", dim=8), FeatureConfig("b", TableConfig("a", 4))], "'b' shares table 'a'"),
        (
            [
                FeatureConfig("a", TableConfig("a", 8, eviction=LRU(max_rows=9))),
                FeatureConfig("b", TableConfig("a", 8)),
            ],
            r"'b' shares table 'a' but asks for .*eviction=None.*; the table is .*LRU\(max_rows=9",
        ),
        (
            [
                FeatureConfig("a", TableConfig("a", 8, precision=TwoPrecisions(5))),
                FeatureConfig("b", TableConfig("a", 8)),
            ],
            r"'b' shares table 'a' but asks for .*precision=None.*; the table is .*TwoPrecisions",
        ),
    ],
)
def test_contradictions_are_refused(features, message):
    with pytest.raises(ConfigError, match=message):
        merge_tables(features)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({}, "table=TableConfig"),
        ({"dim": -1}, "table 'x': dim must be a whole number from 1 to 1048576, got -1"),
        ({"dim": 10**12}, "table 'x': dim must be a whole number from 1 to 1048576, got 1000000000000"),
        ({"dim": 4, "combiner": "max"}, "feature 'x': combiner must be"),
        ({"table": 16}, r"table must be a gmeta.layers.TableConfig, a name, .* got 16; .* give dim=16"),
        ({"table": TableConfig("t", 4), "dim": 8}, "dim=8, but its table 't' is 4 wide"),
        ({"dim": 4, "max_length": 0}, "max_length must be at least 1"),
    ],
)
def test_a_feature_that_makes_no_sense_is_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        FeatureConfig("x", **wrong)


def test_the_short_form_is_a_table_of_the_features_name():
    assert FeatureConfig("x", dim=4) == FeatureConfig("x", TableConfig("x", 4))


def test_tables_of_other_optimizers_stay_apart():
    plan = merge_tables(
        [
            FeatureConfig("a", dim=4),
            FeatureConfig("b", TableConfig("b", 4, optimizer=SGD(0.1))),
            FeatureConfig("c", TableConfig("c", 4, optimizer=SGD(0.1))),
        ]
    )
    assert [merged.tables for merged in plan] == [("a",), ("b", "c")]
