"""Keras layers: embeddings, dense layers that can run with a task's own weights, blocks over sequences."""

from gmeta.layers.adaptive.dense_stack import DenseStack as DenseStack
from gmeta.layers.embedding.collection import CollectionLookup as CollectionLookup
from gmeta.layers.embedding.collection import EmbeddingCollection as EmbeddingCollection
from gmeta.layers.embedding.feature_config import FeatureConfig as FeatureConfig
from gmeta.layers.exchange.recorded_lookups import RecordedLookups as RecordedLookups
from gmeta.layers.exchange.recorded_lookups import TableGradient as TableGradient
from gmeta.layers.exchange.recorded_lookups import record_lookups as record_lookups
from gmeta.layers.multitask.expert_use import ExpertBalance as ExpertBalance
from gmeta.layers.multitask.expert_use import expert_balance as expert_balance
from gmeta.layers.multitask.expert_use import squared_variation as squared_variation
from gmeta.layers.multitask.mmoe import MMoE as MMoE
from gmeta.layers.multitask.task_heads import TaskHeads as TaskHeads
from gmeta.layers.multitask.task_heads import product_logits as product_logits
from gmeta.layers.sequence.bias_tables import RelativeBiasTables as RelativeBiasTables
from gmeta.layers.sequence.fuxi import FuXi as FuXi
from gmeta.layers.sequence.fuxi import FuXiBlock as FuXiBlock
from gmeta.layers.sequence.group_layer_norm import GroupLayerNorm as GroupLayerNorm
from gmeta.layers.sequence.hstu import HSTU as HSTU
from gmeta.layers.sequence.hstu import HSTUBlock as HSTUBlock
from gmeta.layers.sequence.view import SequenceView as SequenceView
from gmeta.layers.sequence.view import sequence_view as sequence_view
from gmeta.ops.layer.norms import layer_norm as layer_norm
from gmeta.ops.layer.norms import rms_norm as rms_norm
