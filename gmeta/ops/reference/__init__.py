"""The native ops in plain NumPy: short enough to be seen to be right, and what the tests compare."""

from gmeta.ops.reference.hash_table import ReferenceHashTable as ReferenceHashTable
from gmeta.ops.reference.initializers import initial_rows as initial_rows
from gmeta.ops.reference.logical_shards import logical_shards as logical_shards
