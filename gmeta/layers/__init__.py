"""Keras layers: the embedding collection and dense layers that can run with a task's own weights."""

from gmeta.layers.dense_stack import DenseStack as DenseStack
from gmeta.layers.embedding_collection import CollectionLookup as CollectionLookup
from gmeta.layers.embedding_collection import EmbeddingCollection as EmbeddingCollection
from gmeta.layers.feature_config import FeatureConfig as FeatureConfig
from gmeta.layers.recorded_lookups import RecordedLookups as RecordedLookups
from gmeta.layers.recorded_lookups import TableGradient as TableGradient
from gmeta.layers.recorded_lookups import record_lookups as record_lookups
