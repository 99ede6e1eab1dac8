r"""Moving averages of all ranks' samples, out of those that each rank has made of its own.

A layer such as `tf.keras.layers.BatchNormalization` keeps averages of what it sees in training, which it uses
when the model is measured. Each rank sees its own samples. So before anyone measures or saves the model, and
not in every step, the ranks' averages :math:`m_r` become

.. math:: m = \frac{1}{N} \sum_r n_r m_r, \quad N = \sum_r n_r,

where :math:`n_r` is how many samples rank r has trained on since the last time: a rank that had none has
nothing to say. All ranks hold m then, and go on from it.
"""

from __future__ import annotations

import tensorflow as tf

from gmeta.core import collectives


def merge_moving_averages(model: tf.keras.Model, seen: tf.Variable) -> None:
    """Give all ranks the same moving averages, in one collective; in none, if the model has none.

    Call it eagerly, on all ranks, between two steps.

    Args:
      model: The compiled model, the same on all ranks.
      seen: () int64: how many samples this rank has trained on since the last time. It becomes 0.
    """
    variables = moving_averages(model)
    if collectives.world().size == 1 or not variables:
        return
    # In float64 what is equal on all ranks stays as it is, to the last bit.
    weight = tf.cast(seen, tf.float64)
    sent = [tf.math.multiply_no_nan(tf.cast(v, tf.float64), weight) for v in variables]
    *totals, everywhere = collectives.allreduce_sum([*sent, weight], name="moving_averages")
    seen.assign(0)
    if float(everywhere) == 0:
        return
    for variable, total in zip(variables, totals, strict=True):
        variable.assign(tf.cast(total / everywhere, variable.dtype))


def moving_averages(model: tf.keras.Model) -> list[tf.Variable]:
    """The variables that aren't trained and say that replicas' values go together as their MEAN."""
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
