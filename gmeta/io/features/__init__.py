"""Features that change, fetched by key from a store while data is read."""

from gmeta.io.features.arrow import ArrowSource as ArrowSource
from gmeta.io.features.hbase import HBaseSource as HBaseSource
from gmeta.io.features.join import join_features as join_features
from gmeta.io.features.policy import FetchCounts as FetchCounts
from gmeta.io.features.policy import FetchPolicy as FetchPolicy
from gmeta.io.features.rocksdb import RocksDBSource as RocksDBSource
from gmeta.io.features.source import FeatureSource as FeatureSource
