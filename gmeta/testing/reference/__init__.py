"""The native ops in NumPy or plain TensorFlow: short enough to be seen to be right; tests compare."""

from gmeta.testing.reference.table.hash_table import ReferenceHashTable as ReferenceHashTable
from gmeta.testing.reference.table.initializers import initial_rows as initial_rows
from gmeta.testing.reference.table.key_merge import merge_keys as merge_keys
from gmeta.testing.reference.table.shards import logical_shards as logical_shards
