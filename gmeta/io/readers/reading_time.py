"""How long training waits for its data, which shows whether a run is bound by data or by compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf


@dataclass(frozen=True)
class Waiting:
    """A reading of `ReadingTime`.

    Attributes:
      waited: Seconds between requesting an element and receiving it.
      worked: Seconds between receiving an element and requesting the next one.
      elements: How many elements were requested, without the first of each epoch.
    """

    waited: float = 0.0
    worked: float = 0.0
    elements: int = 0

    def __add__(self, other: Waiting) -> Waiting:
        return Waiting(self.waited + other.waited, self.worked + other.worked, self.elements + other.elements)

    @property
    def share(self) -> float:
        """The share of time spent waiting, 0 to 1."""
        return self.waited / max(self.waited + self.worked, 1e-9)

    def __str__(self) -> str:
        """Return one line for a report."""
        bound = "data" if self.share > 0.5 else "compute"
        advice = "; read with more threads, or from a faster disk" if bound == "data" else ""
        return (
            f"bound by {bound}: {self.share:.0%} of {self.waited + self.worked:.1f} s were spent waiting for "
            f"data, {self.waited / max(self.elements, 1) * 1e3:.2f} ms a batch{advice}"
        )


class ReadingTime:
    """A measurement, at the end of a dataset, of how long its consumer waits for elements.

    Training waits between requesting an element and receiving it, and works between receiving it and
    requesting the next one. The clock is read before and after each request, in the requesting thread. This
    must be the last transformation: with a ``prefetch`` after it, the prefetch would be the consumer. On a
    GPU, work is only launched in that time, and a step that waits for the GPU counts as work. The first
    element of an epoch isn't counted, because files are opened and functions traced for it.

    Example:
      >>> time = ReadingTime()
      >>> model.fit(time.of(tasks("data/warm")), epochs=5)
      >>> print(time.read())
      bound by compute: 2% of 41.3 s were spent waiting for data, 0.31 ms a batch
    """

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            self._sums = tf.Variable(tf.zeros([3], tf.float64), trainable=False, name="reading_time")
            self._last = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="last_element")

    def of(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Return a dataset of the same elements, timed."""
        clock = tf.data.Dataset.counter().map(lambda number: (number, tf.timestamp()))
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False  # it would become the consumer
        options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
        # A zip requests its inputs one after another.
        return tf.data.Dataset.zip((clock, dataset, clock)).map(self._note).with_options(options)

    def _note(self, asked: Any, element: Any, given: Any) -> Any:
        (number, begin), (_, end) = asked, given
        counted = tf.cast(number > 0, tf.float64)
        times = tf.stack([end - begin, begin - self._last, tf.constant(1.0, tf.float64)])
        with tf.control_dependencies([self._sums.assign_add(times * counted)]):
            last = self._last.assign(end)
        with tf.control_dependencies([last]):
            return tf.nest.map_structure(tf.identity, element, expand_composites=True)

    def read(self) -> Waiting:
        """Return the sums since the beginning or the last `reset`."""
        waited, worked, elements = self._sums.numpy().tolist()
        return Waiting(waited, worked, int(elements))

    def reset(self) -> None:
        """Set everything to zero."""
        self._sums.assign(tf.zeros([3], tf.float64))


def from_memory(dataset: tf.data.Dataset, elements: int = 16) -> tf.data.Dataset:
    """Repeat the first elements of a dataset, up to its length, to train without reading.

    The speed of such training is an upper bound for training with any reader.

    Args:
      dataset: A dataset of known length, or an endless one.
      elements: How many elements are read once and kept in memory.

    Returns:
      A dataset of the same length and structure.
    """
    size = int(dataset.cardinality())
    repeated = dataset.take(elements).cache().repeat()
    if size == tf.data.UNKNOWN_CARDINALITY:
        size = sum(1 for _ in dataset)
    return repeated if size == tf.data.INFINITE_CARDINALITY else repeated.take(size)
