import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gmeta.core.errors import ConfigError
from gmeta.initializers.distributions import Normal, Zeros
from gmeta.layers import FeatureConfig
from gmeta.layers.embedding.merge_plan import merge_tables
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
    configs = [FeatureConfig(f"f{n}", dim, initializer=start) for n, dim, start in features]
    for merged in merge_tables(configs):
        m = len(merged.tables)
        assert merged.id_bits == 63 - math.ceil(math.log2(m + 1))
        seen = {}
        for feature in merged.features:
            for raw in {0, merged.id_limit - 1, data.draw(st.integers(0, merged.id_limit - 1))}:
                key = merged.key_prefix(feature) | raw
                assert 0 <= key < 2**63
                assert seen.setdefault(key, (feature.table_name, raw)) == (feature.table_name, raw)


def test_equal_widths_and_starts_merge_and_others_do_not():
    plan = merge_tables(
        [
            FeatureConfig("a", 8, initializer=Zeros()),
            FeatureConfig("b", 4, initializer=Zeros()),
            FeatureConfig("c", 8, initializer=Normal()),
            FeatureConfig("d", 8, initializer=Zeros()),
        ]
    )
    assert [merged.tables for merged in plan] == [("a", "d"), ("b",), ("c",)]


def test_policies_keep_tables_apart():
    counted, bounded = CountAdmission(3), LRU(max_rows=100)
    plan = merge_tables(
        [
            FeatureConfig("a", 8),
            FeatureConfig("b", 8, admission=counted),
            FeatureConfig("c", 8, admission=CountAdmission(3)),
            FeatureConfig("d", 8, eviction=bounded),
            FeatureConfig("e", 8, admission=counted, eviction=bounded),
            FeatureConfig("f", 8, eviction=LRU(max_rows=100)),
            FeatureConfig("g", 8, eviction=LRU(max_rows=101)),
            FeatureConfig("h", 8, precision=TwoPrecisions(5)),
            FeatureConfig("i", 8, precision=TwoPrecisions(6)),
            FeatureConfig("j", 8, precision=TwoPrecisions(5)),
        ]
    )
    tables = [("a",), ("b", "c"), ("d", "f"), ("e",), ("g",), ("h", "j"), ("i",)]
    assert [merged.tables for merged in plan] == tables
    assert plan[3].policy.admission == counted
    assert plan[3].policy.eviction == bounded


def test_features_that_name_one_table_share_its_keys():
    item = FeatureConfig("item", 8)
    history = FeatureConfig("history", 8, pooling="mean", table="item")
    (merged,) = merge_tables([item, history])
    assert merged.tables == ("item",)
    assert merged.key_prefix(item) == merged.key_prefix(history)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([], "at least one feature"),
        (["item"], r"must be gmeta\.layers\.FeatureConfig\(name, dim\), got 'item'"),
        ([FeatureConfig("a", 8), FeatureConfig("a", 8)], "named twice: a"),
        ([FeatureConfig("a", 8), FeatureConfig("b", 4, table="a")], "'b' shares table 'a'"),
        (
            [FeatureConfig("a", 8, eviction=LRU(max_rows=9)), FeatureConfig("b", 8, table="a")],
            r"'b' shares table 'a' but asks for .*eviction=None.*; the table has .*LRU\(max_rows=9",
        ),
        (
            [FeatureConfig("a", 8, precision=TwoPrecisions(5)), FeatureConfig("b", 8, table="a")],
            r"'b' shares table 'a' but asks for .*precision=None.*; the table has .*TwoPrecisions",
        ),
    ],
)
def test_contradictions_are_refused(features, message):
    with pytest.raises(ConfigError, match=message):
        merge_tables(features)


@pytest.mark.parametrize("wrong", [{"dim": 0}, {"dim": 4, "pooling": "max"}])
def test_a_feature_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ConfigError, match="feature 'x'"):
        FeatureConfig("x", **wrong)
