"""Changing features, fetched by key from a store while data is read.

`feature_join` adds them to a dataset. `feature_source` is the interface of stores; `feature_join` implements
it for tables in memory, and `stores` for databases. `cells` encodes their values.
"""

from gmeta.io.features.cells import FetchCounts, FetchPolicy
from gmeta.io.features.feature_join import ArrowSource, join_features
from gmeta.io.features.feature_source import FeatureSource
from gmeta.io.features.stores import HBaseSource, RocksDBSource

__all__ = [
    "ArrowSource",
    "FeatureSource",
    "FetchCounts",
    "FetchPolicy",
    "HBaseSource",
    "RocksDBSource",
    "join_features",
]
