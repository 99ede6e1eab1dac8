"""The native ops in NumPy or plain TensorFlow: short enough to be seen to be right; tests compare."""

from gmeta.ops.reference.hash_table import ReferenceHashTable as ReferenceHashTable
from gmeta.ops.reference.initializers import initial_rows as initial_rows
from gmeta.ops.reference.logical_shards import logical_shards as logical_shards
from gmeta.ops.reference.merge_keys import merge_keys as merge_keys
