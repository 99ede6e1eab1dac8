"""Keras metrics that see whole tasks: how well a model ranks each task's own samples.

A mean absolute error can be taken over samples of all tasks together, and Keras' own metrics do. The order in
which a user is shown items is right or wrong within that user: such a metric must know which samples belong
together. `gmeta.models.MetaModel` hands those of this room whole tasks.
"""

from gmeta.metrics.gauc import GAUC as GAUC
from gmeta.metrics.ndcg import NDCG as NDCG
from gmeta.metrics.task_metric import TaskMetric as TaskMetric
