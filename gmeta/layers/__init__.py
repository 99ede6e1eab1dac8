"""Keras layers: embeddings, layers with a task's own weights, and blocks over sequences.

- `embedding` looks up features in dynamic tables, and `exchange` fetches the rows from their ranks.
- `adaptive` holds layers whose weights the inner loop adapts.
- `sequence` holds HSTU, FuXi and their stacks, `multitask` MMoE and heads for several tasks.
"""

from gmeta.layers.adaptive.mlp import MLP
from gmeta.layers.embedding.collection import CollectionLookup, EmbeddingCollection
from gmeta.layers.embedding.feature_config import FeatureConfig
from gmeta.layers.embedding.pooling import EntityVector
from gmeta.layers.embedding.table_config import TableConfig
from gmeta.layers.exchange.recorded_lookups import RecordedLookups, TableGradient, record_lookups
from gmeta.layers.multitask.mmoe import ExpertBalance, MMoE, expert_balance, squared_variation
from gmeta.layers.multitask.task_heads import TaskHeads, product_logits
from gmeta.layers.sequence.bias_tables import RelativeBiasTables
from gmeta.layers.sequence.block import SequenceBlock, SequenceLayer
from gmeta.layers.sequence.fuxi import FuXi, FuXiBlock
from gmeta.layers.sequence.hstu import HSTU, GroupLayerNorm, HSTUBlock
from gmeta.layers.sequence.reading import Kept, Place, Reading, SequenceView, sequence_view
from gmeta.layers.sequence.stack import SequenceStack
from gmeta.ops.hstu_layer import layer_norm, rms_norm

__all__ = [
    "HSTU",
    "MLP",
    "CollectionLookup",
    "EmbeddingCollection",
    "EntityVector",
    "ExpertBalance",
    "FeatureConfig",
    "FuXi",
    "FuXiBlock",
    "GroupLayerNorm",
    "HSTUBlock",
    "Kept",
    "MMoE",
    "Place",
    "Reading",
    "RecordedLookups",
    "RelativeBiasTables",
    "SequenceBlock",
    "SequenceLayer",
    "SequenceStack",
    "SequenceView",
    "TableConfig",
    "TableGradient",
    "TaskHeads",
    "expert_balance",
    "layer_norm",
    "product_logits",
    "record_lookups",
    "rms_norm",
    "sequence_view",
    "squared_variation",
]
