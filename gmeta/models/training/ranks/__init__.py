"""Keras' training loops on several ranks, with the same results as on one.

`loops` is a base class of gmeta's models, placed before `tf.keras.Model`, and uses the other modules. `start`
makes ranks begin alike. `data` gives each rank its part of the data and all ranks the same number of steps.
`step` ends the steps together, with mean gradients over the samples of all ranks. `averages` computes the
means of layers' moving averages, and `metric_merge` adds up the ranks' metrics. `stopping` decides for
all ranks when to stop. With one rank none of it runs.
"""

__all__: list[str] = []
