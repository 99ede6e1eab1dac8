"""Keras layers: embeddings, dense layers that can run with a task's own weights, blocks over sequences."""

from gmeta.layers.dense_stack import DenseStack as DenseStack
from gmeta.layers.embedding_collection import CollectionLookup as CollectionLookup
from gmeta.layers.embedding_collection import EmbeddingCollection as EmbeddingCollection
from gmeta.layers.expert_balance import ExpertBalance as ExpertBalance
from gmeta.layers.expert_balance import expert_balance as expert_balance
from gmeta.layers.expert_balance import squared_variation as squared_variation
from gmeta.layers.feature_config import FeatureConfig as FeatureConfig
from gmeta.layers.fuxi import FuXi as FuXi
from gmeta.layers.fuxi import FuXiBlock as FuXiBlock
from gmeta.layers.group_layer_norm import GroupLayerNorm as GroupLayerNorm
from gmeta.layers.hstu import HSTU as HSTU
from gmeta.layers.hstu import HSTUBlock as HSTUBlock
from gmeta.layers.mmoe import MMoE as MMoE
from gmeta.layers.recorded_lookups import RecordedLookups as RecordedLookups
from gmeta.layers.recorded_lookups import TableGradient as TableGradient
from gmeta.layers.recorded_lookups import record_lookups as record_lookups
from gmeta.layers.relative_bias import RelativeBiasTables as RelativeBiasTables
from gmeta.layers.sequence_view import SequenceView as SequenceView
from gmeta.layers.sequence_view import sequence_view as sequence_view
from gmeta.layers.task_heads import TaskHeads as TaskHeads
from gmeta.layers.task_heads import product_logits as product_logits
from gmeta.ops.normalisation import layer_norm as layer_norm
from gmeta.ops.normalisation import rms_norm as rms_norm
