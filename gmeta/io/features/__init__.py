"""Features that change, fetched by key from a store while data is read."""

from gmeta.io.features.arrow import ArrowSource as ArrowSource
from gmeta.io.features.feature_source import FeatureSource as FeatureSource
from gmeta.io.features.fetch_policy import FetchCounts as FetchCounts
from gmeta.io.features.fetch_policy import FetchPolicy as FetchPolicy
from gmeta.io.features.hbase import HBaseSource as HBaseSource
from gmeta.io.features.join import join_features as join_features
from gmeta.io.features.rocksdb import RocksDBSource as RocksDBSource
