"""A Keras callback of steps that lets the next step begin while the GPU still works on the last."""

from __future__ import annotations

import tensorflow as tf


class StepCallback(tf.keras.callbacks.Callback):
    """The base class of callbacks that are called in each step and don't read the step's logs.

    Keras copies the loss and the metrics from the GPU for a callback that has a method of batches, so each
    step would wait for the end of the last. With this base class the logs of a step are tensors, and nobody
    waits for them. An epoch's logs are numbers, as ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self._supports_tf_logs = True
