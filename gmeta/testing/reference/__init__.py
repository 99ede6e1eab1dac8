"""The native ops in NumPy or plain TensorFlow: short enough to be seen to be right; tests compare."""

from gmeta.testing.reference.table.hash_table import ReferenceHashTable
from gmeta.testing.reference.table.initializers import initial_rows
from gmeta.testing.reference.table.key_merge import merge_keys
from gmeta.testing.reference.table.shards import logical_shards

__all__ = ["ReferenceHashTable", "initial_rows", "logical_shards", "merge_keys"]
