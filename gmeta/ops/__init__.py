"""TensorFlow ops, native where faster, and the dynamic embedding table, `HashTable` (in `table`).

- `id_hash` and `distinct`: hashes of ids, and a batch's distinct ids with their owners.
- `key_messages` and `row_buffers`: packing and unpacking of the contents of all-to-alls.
- `jagged`: concatenated sequences of different lengths, without padding.
- `attention_inputs`, `jagged_attention` and `hstu_layer`: masks and attention over them.
- `trie` and `trie_draws`: beam search and draws in a trie of codes.
- `device`: the device of a table's rows, and whether an op uses its kernel or plain TensorFlow.

`support.reference` computes the same in NumPy, for tests.
"""

from gmeta.core.imports import load_lazily
from gmeta.ops import jagged
from gmeta.ops.attention_inputs import AttentionMask, RelativeBias
from gmeta.ops.id_hash import hash_ids, hash_text
from gmeta.ops.jagged import Jagged
from gmeta.ops.jagged_attention import hstu_attention
from gmeta.ops.table.hash_table import HashTable

_MOVED = {
    "AdmissionState": "gmeta.ops.table.records",
    "FilterShards": "gmeta.ops.table.records",
    "FrozenTable": "gmeta.ops.table.portable_tables",
    "GumbelStep": "gmeta.ops.trie_draws",
    "Lookup": "gmeta.ops.table.records",
    "OwnedKeys": "gmeta.ops.key_messages",
    "PackedRows": "gmeta.ops.key_messages",
    "Peeked": "gmeta.ops.table.read_ahead",
    "Records": "gmeta.ops.table.records",
    "Reread": "gmeta.ops.table.read_ahead",
    "RoutedKeys": "gmeta.ops.key_messages",
    "ShardRecords": "gmeta.ops.table.records",
    "Statistics": "gmeta.ops.table.records",
    "TableSnapshot": "gmeta.ops.table.restored_rows",
    "TrieNoise": "gmeta.ops.trie_draws",
    "TrieStep": "gmeta.ops.trie",
    "Unique": "gmeta.ops.distinct",
    "UniqueByOwner": "gmeta.ops.distinct",
    "UnknownRows": "gmeta.ops.table.portable_tables",
    "bias_attention": "gmeta.ops.jagged_attention",
    "count_collisions": "gmeta.ops.id_hash",
    "dense_mask": "gmeta.ops.jagged_attention",
    "fold_ids": "gmeta.ops.id_hash",
    "hstu_mix": "gmeta.ops.hstu_layer",
    "initial_rows_of": "gmeta.ops.table.portable_tables",
    "layer_norm": "gmeta.ops.hstu_layer",
    "merge_keys": "gmeta.ops.id_hash",
    "pack_rows": "gmeta.ops.row_buffers",
    "padded_attention": "gmeta.ops.jagged_attention",
    "portable_ops": "gmeta.ops.table.portable_tables",
    "receive_keys": "gmeta.ops.key_messages",
    "rms_norm": "gmeta.ops.hstu_layer",
    "route_keys": "gmeta.ops.key_messages",
    "tables_saved_elsewhere": "gmeta.ops.table.records",
    "time_bucket": "gmeta.ops.attention_inputs",
    "trie_gumbel_step": "gmeta.ops.trie_draws",
    "trie_log_probs": "gmeta.ops.trie",
    "trie_sample": "gmeta.ops.trie_draws",
    "trie_step": "gmeta.ops.trie",
    "unique": "gmeta.ops.distinct",
    "unique_by_owner": "gmeta.ops.distinct",
    "unpack_rows": "gmeta.ops.row_buffers",
}
"""Old name -> the module that has it now, for one release."""

__all__ = [
    "AttentionMask",
    "HashTable",
    "Jagged",
    "RelativeBias",
    "hash_ids",
    "hash_text",
    "hstu_attention",
    "jagged",
]

__getattr__, __dir__ = load_lazily(__name__, {}, _MOVED)
