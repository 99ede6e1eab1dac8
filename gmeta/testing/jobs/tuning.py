"""Lets iterators of data sets end at once in tests.

TensorFlow 2.16 doesn't wake the thread that tunes a pipeline when an iterator ends before its data, so that
the iterator's end waits as long as the iterator has lived (`gmeta.io.readers.group_reader.settle`). The
garbage collector then stops a process of many tests for up to 40 s at a time.
"""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops


def tune_no_datasets() -> None:
    """From now on, in this process, iterate over data sets without tuning where they don't ask for it."""
    settle = dataset_ops.DatasetV2._apply_debug_options

    def settle_untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
        settled = settle(dataset)
        if settled.options().autotune.enabled is not None:
            return settled
        options = tf.data.Options()
        options.autotune.enabled = False
        return settled.with_options(options)

    dataset_ops.DatasetV2._apply_debug_options = settle_untuned
