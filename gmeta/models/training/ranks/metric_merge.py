"""Metrics of all ranks' samples, out of those that each rank has measured on its own.

A Keras metric keeps sums (of values and weights, of a histogram's counts), and its variables say how ranks'
values go together: SUM. So the sums are added up and the result is computed from them: an AUC of all samples,
not a mean of AUCs. One that keeps samples (`gmeta.metrics.SampleMetric`) gathers those of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from gmeta.core import collectives
from gmeta.metrics import SampleMetric


def merge_over_ranks(metrics: Iterable[tf.keras.metrics.Metric]) -> None:
    """Give the metrics of every rank the state that one rank would have that had seen all samples.

    Call it eagerly, on all ranks, once: then all of them hold the whole. The next ``reset_state`` makes it
    their own again. Variables whose aggregation is MEAN become the mean; others stay the rank's own.

    Args:
      metrics: The metrics, the same on all ranks.
    """
    size = collectives.world().size
    if size == 1:
        return
    metrics = list({id(metric): metric for metric in metrics}.values())
    for metric in metrics:
        if isinstance(metric, SampleMetric):
            metric.gather_over_ranks()
    variables = list({id(v): v for metric in metrics for v in metric.variables}.values())
    summed = [v for v in variables if v.aggregation in _SHARE]
    if not summed:
        return
    # Exact for counts, and one type is one collective.
    totals = collectives.allreduce_sum([tf.cast(v, tf.float64) for v in summed], name="metrics")
    for variable, total in zip(summed, totals, strict=True):
        share = total / size if variable.aggregation == tf.VariableAggregation.MEAN else total
        if variable.dtype.is_integer:
            share = tf.round(share)
        variable.assign(tf.cast(share, variable.dtype))


_SHARE = (tf.VariableAggregation.SUM, tf.VariableAggregation.MEAN)
