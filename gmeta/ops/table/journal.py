"""The part of `gmeta.ops.HashTable` that notes removed keys for incremental saves."""

from __future__ import annotations

import tensorflow as tf

from gmeta.core.native import load_op_library

_native = load_op_library("ops")
for _name in ("StartJournal", "JournalSaved", "JournalWhole"):
    tf.no_gradient(f"GmetaHashTable{_name}")


class NotesRemovals:
    """A table's journal of removed keys."""

    resource_handle: tf.Tensor

    def start_journal(self, limit: int) -> tf.Operation | None:
        """Note removed keys from now on, so that `export_shards` can give them to an incremental save.

        Args:
          limit: About how many keys to note, 8 bytes each; 0 ends the journal. If more distinct keys are
            removed between two saves, the journal overflows, and the next save must be a full one.

        Returns:
          The operation, in a graph; None in eager mode.

        Raises:
          tf.errors.InvalidArgumentError: ``limit`` is negative.
        """
        return _native.gmeta_hash_table_start_journal(self.resource_handle, tf.cast(limit, tf.int64))

    def journal_saved(self) -> tf.Operation | None:
        """Drop the removed keys that `export_shards` has returned from the journal: they are saved."""
        return _native.gmeta_hash_table_journal_saved(self.resource_handle)

    def journal_whole(self) -> tf.Tensor:
        """Return whether the journal has every removal since it was started, () bool; `import_` breaks it."""
        return tf.cast(_native.gmeta_hash_table_journal_whole(self.resource_handle), tf.bool)
