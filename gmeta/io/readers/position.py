"""The epoch and step that a dataset has reached, counted outside the dataset, in variables."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def count_epochs(first: int) -> tf.data.Dataset:
    """Return a dataset of one element, (epoch, 0), whose epoch grows by one at each iteration.

    tf.data's own means don't suffice. ``shuffle(reshuffle_each_iteration=True)`` and
    ``random(rerandomize_each_iteration=True)`` draw each epoch's seed from a generator, so epoch e needs the
    e epochs before it, and ``counter().flat_map`` makes one endless epoch. So a variable counts. A separate
    stage reads it: downstream, the number is an ordinary element, which a saved iterator restores instead of
    counting again.
    """
    with tf.init_scope(), tf.device("CPU:0"):
        counter = tf.Variable(first, dtype=tf.int64, trainable=False, name="epoch")
    return tf.data.Dataset.range(1).map(
        lambda _: (counter.assign_add(1, read_value=True) - 1, tf.constant(0, tf.int64))
    )


class ReadingPosition(tf.Module):
    """The epoch and step that a dataset has reached, as variables that a checkpoint can hold.

    Keras saves and restores a model, its optimizer and its epoch, but not how far its data has been read. A
    dataset with a position (`gmeta.io.tasks`, `gmeta.io.groups`) begins there, and counts the elements taken
    from it in the position. Make the position an attribute of the model: ``BackupAndRestore`` or
    ``tf.train.Checkpoint`` then saves and restores it with the model, at the end of an epoch or after any
    step, and training resumes with the next element.

    A new iteration also resumes with the next element, or with the next epoch once all steps of an epoch are
    taken. Use a position for one dataset only. Buffers must come before the counting, so the counting comes
    last. `tasks` ends with it. With `groups`, add it after your own transformations:
    ``position.count(groups(..., start=position).prefetch(2))``.

    Attributes:
      epoch: () int64 variable.
      step: () int64 variable, elements taken in this epoch.

    Example:
      >>> model.reading = ReadingPosition()
      >>> warm = tasks("data/warm", start=model.reading)
      >>> backup = tf.keras.callbacks.BackupAndRestore("backup", save_freq=100)
      >>> model.fit(warm.repeat(), epochs=20, steps_per_epoch=250, callbacks=[backup])
    """

    def __init__(self, epoch: int = 0) -> None:
        super().__init__(name="reading_position")
        with tf.init_scope(), tf.device("CPU:0"):
            self.epoch = tf.Variable(epoch, dtype=tf.int64, trainable=False, name="epoch")
            self.step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")

    def epochs(self, steps: int) -> tf.data.Dataset:
        """Return a dataset of one element, (epoch, step), read when an iteration begins.

        Args:
          steps: How many steps an epoch has; once they are taken, the next epoch begins.
        """

        def begin(_: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            over = tf.cast(self.step >= steps, tf.int64)
            epoch = self.epoch.assign_add(over, read_value=True)
            step = self.step.assign(self.step * (1 - over), read_value=True)
            return epoch, step

        return tf.data.Dataset.range(1).map(begin)

    def count(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Return the dataset, counting the elements that are taken from it."""

        def count(*element: Any) -> Any:
            with tf.control_dependencies([self.step.assign_add(1)]):
                found = tf.nest.map_structure(tf.identity, element, expand_composites=True)
            return found if len(found) > 1 else found[0]

        options = tf.data.Options()
        # It would put a buffer after the counting.
        options.experimental_optimization.inject_prefetch = False
        return dataset.map(count).with_options(options)
