"""Keras layers: embeddings, layers with a task's own weights, and blocks over sequences.

- `embedding` looks up features in dynamic tables, and `exchange` fetches the rows from their ranks.
- `networks` holds layers whose weights the inner loop adapts.
- `sequence` holds HSTU, FuXi and their stacks; `mmoe` and `task_heads` are layers for several labels.
"""

from gmeta.core.imports import load_lazily
from gmeta.layers.embedding.collection import EmbeddingCollection
from gmeta.layers.embedding.feature_config import FeatureConfig
from gmeta.layers.embedding.table_config import TableConfig
from gmeta.layers.exchange.recorded_lookups import record_lookups
from gmeta.layers.mmoe import MMoE
from gmeta.layers.networks import MLP
from gmeta.layers.sequence.hstu import HSTU
from gmeta.layers.sequence.stack import FuXi

_MOVED = {
    "CollectionLookup": "gmeta.layers.embedding.collection",
    "EntityVector": "gmeta.layers.embedding.pooling",
    "ExpertBalance": "gmeta.layers.mmoe",
    "FuXiBlock": "gmeta.layers.sequence.stack",
    "GroupLayerNorm": "gmeta.layers.sequence.hstu",
    "HSTUBlock": "gmeta.layers.sequence.hstu",
    "Kept": "gmeta.layers.sequence.reading",
    "Place": "gmeta.layers.sequence.reading:AppendedPlace",
    "Reading": "gmeta.layers.sequence.reading",
    "RecordedLookups": "gmeta.layers.exchange.recorded_lookups",
    "RelativeBiasTables": "gmeta.layers.sequence.block",
    "SequenceBlock": "gmeta.layers.sequence.block",
    "SequenceLayer": "gmeta.layers.sequence.block",
    "SequenceStack": "gmeta.layers.sequence.stack",
    "SequenceView": "gmeta.layers.sequence.reading",
    "TableGradient": "gmeta.layers.exchange.recorded_lookups",
    "TaskHeads": "gmeta.layers.task_heads",
    "expert_balance": "gmeta.layers.mmoe",
    "layer_norm": "gmeta.ops.hstu_layer",
    "product_logits": "gmeta.layers.task_heads",
    "rms_norm": "gmeta.ops.hstu_layer",
    "sequence_view": "gmeta.layers.sequence.reading",
    "squared_variation": "gmeta.layers.mmoe",
}
"""Old name -> the module that has it now, for one release."""

__all__ = [
    "HSTU",
    "MLP",
    "EmbeddingCollection",
    "FeatureConfig",
    "FuXi",
    "MMoE",
    "TableConfig",
    "record_lookups",
]

__getattr__, __dir__ = load_lazily(__name__, {}, _MOVED)
