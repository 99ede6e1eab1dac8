"""Saves and loads a table's checkpoint as named NumPy arrays, for Keras' own file formats."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from gmeta.ops.table.hash_table import HashTable

# Both functions use the tensors that the table gives to TensorFlow's checkpoints, so its records have one
# form and one check. Text is stored as bytes, because the stores hold only numbers.


def save_table(table: HashTable, store: Any, prefix: str) -> None:
    """Write a table's records under ``prefix-...``."""
    for name, tensor in table.saved_tensors().items():
        value = tensor.numpy()
        store[prefix + name] = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else value


def load_table(table: HashTable, store: Any, prefix: str) -> None:
    """Replace a table's records by what `save_table` wrote."""
    tensors = {}
    for name, tensor in table._serialize_to_tensors().items():
        value = np.asarray(store[prefix + name])
        tensors[name] = tf.constant(value.tobytes() if tensor.dtype == tf.string else value)
    table._restore_from_tensors(tensors)
