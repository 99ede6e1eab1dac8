"""TensorFlow ops, native where that pays, and the dynamic embedding table, `HashTable` (in `table`).

- `id_hash` and `distinct`: hashes of ids, and a batch's distinct ids with their owners.
- `key_messages` and `row_buffers`: what an all-to-all carries, packed and unpacked.
- `jagged`: sequences of different lengths, one after another, without padding.
- `attention_inputs`, `jagged_attention`, `padded_forms` and `hstu_layer`: masks and attention over them;
  `native_forms` chooses the kernel or plain TensorFlow.
- `trie` and `trie_draws`: beam search and draws in a trie of codes.
- `device`: where a table's rows are. `support.reference` computes the same in NumPy, for tests.
"""

from gmeta.ops import jagged
from gmeta.ops.attention_inputs import AttentionMask, RelativeBias, time_bucket
from gmeta.ops.distinct import Unique, UniqueByOwner, unique, unique_by_owner
from gmeta.ops.hstu_layer import hstu_mix, layer_norm, rms_norm
from gmeta.ops.id_hash import count_collisions, fold_ids, hash_ids, hash_text, merge_keys
from gmeta.ops.jagged import Jagged
from gmeta.ops.jagged_attention import bias_attention, hstu_attention
from gmeta.ops.key_messages import OwnedKeys, PackedRows, RoutedKeys, receive_keys, route_keys
from gmeta.ops.padded_forms import dense_mask, padded_attention
from gmeta.ops.row_buffers import pack_rows, unpack_rows
from gmeta.ops.table.hash_table import HashTable
from gmeta.ops.table.portable_tables import FrozenTable, UnknownRows, initial_rows_of, portable_ops
from gmeta.ops.table.read_ahead import Peeked, Reread
from gmeta.ops.table.records import (
    AdmissionState,
    FilterShards,
    Lookup,
    Records,
    ShardRecords,
    Statistics,
    tables_saved_elsewhere,
)
from gmeta.ops.table.snapshot import TableSnapshot
from gmeta.ops.trie import TrieStep, trie_log_probs, trie_step
from gmeta.ops.trie_draws import GumbelStep, TrieNoise, trie_gumbel_step, trie_sample

__all__ = [
    "AdmissionState",
    "AttentionMask",
    "FilterShards",
    "FrozenTable",
    "GumbelStep",
    "HashTable",
    "Jagged",
    "Lookup",
    "OwnedKeys",
    "PackedRows",
    "Peeked",
    "Records",
    "RelativeBias",
    "Reread",
    "RoutedKeys",
    "ShardRecords",
    "Statistics",
    "TableSnapshot",
    "TrieNoise",
    "TrieStep",
    "Unique",
    "UniqueByOwner",
    "UnknownRows",
    "bias_attention",
    "count_collisions",
    "dense_mask",
    "fold_ids",
    "hash_ids",
    "hash_text",
    "hstu_attention",
    "hstu_mix",
    "initial_rows_of",
    "jagged",
    "layer_norm",
    "merge_keys",
    "pack_rows",
    "padded_attention",
    "portable_ops",
    "receive_keys",
    "rms_norm",
    "route_keys",
    "tables_saved_elsewhere",
    "time_bucket",
    "trie_gumbel_step",
    "trie_log_probs",
    "trie_sample",
    "trie_step",
    "unique",
    "unique_by_owner",
    "unpack_rows",
]
