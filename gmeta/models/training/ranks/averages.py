r"""Merges the ranks' moving averages into averages over all ranks' samples.

A layer such as `tf.keras.layers.BatchNormalization` keeps averages of its inputs in training, and uses them
in evaluation. Each rank sees only its own samples. So before the model is evaluated or saved, but not in
every step, the ranks' averages :math:`m_r` are replaced by

.. math:: m = \frac{1}{N} \sum_r n_r m_r, \quad N = \sum_r n_r,

where :math:`n_r` is the number of samples that rank r has trained on since the last merge. A rank without
samples has no weight. All ranks then hold m and continue from it.
"""

from __future__ import annotations

import tensorflow as tf

from gmeta.core import collectives


def merge_moving_averages(model: tf.keras.Model, seen: tf.Variable) -> None:
    """Give all ranks the same moving averages, in one collective.

    A model without moving averages needs no collective. Call this eagerly, on all ranks, between two steps.

    Args:
      model: The compiled model, the same on all ranks.
      seen: () int64: the number of samples that this rank has trained on since the last merge. It is reset
        to 0.
    """
    variables = moving_averages(model)
    if collectives.world().size == 1 or not variables:
        return
    # In float64, values that are equal on all ranks stay the same to the last bit.
    weight = tf.cast(seen, tf.float64)
    sent = [tf.math.multiply_no_nan(tf.cast(v, tf.float64), weight) for v in variables]
    *totals, everywhere = collectives.allreduce_sum([*sent, weight], name="moving_averages")
    seen.assign(0)
    if float(everywhere) == 0:
        return
    for variable, total in zip(variables, totals, strict=True):
        variable.assign(tf.cast(total / everywhere, variable.dtype))


def moving_averages(model: tf.keras.Model) -> list[tf.Variable]:
    """Return the untrained variables whose aggregation over replicas is MEAN."""
    if not model.built:
        return []
    measured = {id(variable) for metric in model.metrics for variable in metric.variables}
    return [
        variable
        for variable in {id(v): v for v in model.non_trainable_variables}.values()
        if variable.dtype.is_floating
        and variable.aggregation == tf.VariableAggregation.MEAN
        and id(variable) not in measured
    ]
