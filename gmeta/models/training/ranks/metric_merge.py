"""Merges the ranks' metrics into metrics of all ranks' samples.

A Keras metric keeps sums (of values and weights, or of a histogram's counts), and its variables have the
aggregation SUM. So the ranks' sums are added up and the result is computed from the totals: an AUC of all
samples, not a mean of AUCs. A metric that keeps samples (`gmeta.metrics.SampleMetric`) gathers those of all
ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from gmeta.core import collectives
from gmeta.metrics import SampleMetric


def merge_over_ranks(metrics: Iterable[tf.keras.metrics.Metric]) -> None:
    """Give every rank's metrics the state that one rank would have after seeing all samples.

    Call this eagerly, on all ranks, and only once: afterwards every rank's state covers all samples. The next
    ``reset_state`` makes the state the rank's own again. Variables whose aggregation is MEAN become the mean.
    Variables with an aggregation other than SUM and MEAN stay the rank's own.

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
    # float64 is exact for counts, and one dtype needs only one collective.
    totals = collectives.allreduce_sum([tf.cast(v, tf.float64) for v in summed], name="metrics")
    for variable, total in zip(summed, totals, strict=True):
        share = total / size if variable.aggregation == tf.VariableAggregation.MEAN else total
        if variable.dtype.is_integer:
            share = tf.round(share)
        variable.assign(tf.cast(share, variable.dtype))


_SHARE = (tf.VariableAggregation.SUM, tf.VariableAggregation.MEAN)
