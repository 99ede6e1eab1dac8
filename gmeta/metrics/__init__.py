"""Keras metrics: how well a model ranks each task's own samples, all samples, or the whole catalogue.

A mean absolute error can be taken over samples of all tasks together, and Keras' own metrics do. The order in
which a user is shown items is right or wrong within that user: such a metric must know which samples belong
together. `gmeta.models.MetaModel` hands `GAUC`, `NDCG` and other kinds of `ranking.TaskMetric` whole tasks.

`AUC` and `UserGAUC` take samples as they come and are exact over batches and ranks. `NextItem` is of sequence
models: at which rank the item that came next is among all items.
"""

from gmeta.core.imports import load_lazily
from gmeta.metrics.auc import AUC, UserGAUC
from gmeta.metrics.next_item import NextItem
from gmeta.metrics.ranking import GAUC, NDCG

_MOVED = {
    "SampleMetric": "gmeta.metrics.auc",
    "TaskMetric": "gmeta.metrics.ranking",
    "catalogue_ranks": "gmeta.metrics.next_item",
}
"""Old name -> the module that has it now, for one release."""

__all__ = ["AUC", "GAUC", "NDCG", "NextItem", "UserGAUC"]

__getattr__, __dir__ = load_lazily(__name__, {}, _MOVED)
