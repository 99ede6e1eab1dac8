"""Keras' training loops on several ranks, with the numbers of one.

`loops` stands before `tf.keras.Model` in gmeta's models and brings the rest together: `start` makes ranks
begin alike, `data` gives each its part and all of them the same number of steps, `step` ends the steps
together, `gradients` makes means over the samples of all ranks, `averages` of layers' moving averages,
`metrics` adds up what was measured, and `stopping` decides for all of them when to stop. With one rank none
of it runs.
"""

__all__: list[str] = []
