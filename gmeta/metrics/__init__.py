"""Keras metrics: how well a model ranks each task's own samples, all samples, or the whole catalogue.

A mean absolute error can be taken over samples of all tasks together, and Keras' own metrics do. The order in
which a user is shown items is right or wrong within that user: such a metric must know which samples belong
together. `gmeta.models.MetaModel` hands `GAUC`, `NDCG` and other kinds of `TaskMetric` whole tasks.

`AUC` and `UserGAUC` take samples as they come and are exact over batches and ranks. `NextItem` is of sequence
models: at which rank the item that came next is among all items (`catalogue_ranks`).
"""

from gmeta.metrics.auc import AUC, SampleMetric, UserGAUC
from gmeta.metrics.next_item import NextItem, catalogue_ranks
from gmeta.metrics.ranking import GAUC, NDCG, TaskMetric

__all__ = ["AUC", "GAUC", "NDCG", "NextItem", "SampleMetric", "TaskMetric", "UserGAUC", "catalogue_ranks"]
