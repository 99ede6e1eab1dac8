"""Native ops and their settings.

The dynamic embedding table is `HashTable`; `reference` holds the same ops in NumPy.
"""

from gmeta.ops import jagged
from gmeta.ops.attention.jagged_attention import bias_attention, hstu_attention
from gmeta.ops.attention.mask import AttentionMask
from gmeta.ops.attention.padded import dense_mask, padded_attention
from gmeta.ops.attention.relative_bias import RelativeBias, time_bucket
from gmeta.ops.exchange.key_messages import receive_keys, route_keys
from gmeta.ops.exchange.messages import OwnedKeys, PackedRows, RoutedKeys
from gmeta.ops.exchange.row_buffers import pack_rows, unpack_rows
from gmeta.ops.jagged import Jagged
from gmeta.ops.keys.distinct import Unique, UniqueByOwner, unique, unique_by_owner
from gmeta.ops.keys.id_hash import count_collisions, fold_ids, hash_ids, hash_text
from gmeta.ops.keys.key_merge import merge_keys
from gmeta.ops.layer.mix import hstu_mix
from gmeta.ops.layer.norms import layer_norm, rms_norm
from gmeta.ops.table.frozen_table import FrozenTable, UnknownRows
from gmeta.ops.table.hash_table import HashTable
from gmeta.ops.table.lookup import Lookup
from gmeta.ops.table.portable_tables import initial_rows_of, portable_ops
from gmeta.ops.table.read_ahead import Peeked, Reread
from gmeta.ops.table.records import AdmissionState, FilterShards, Records, ShardRecords
from gmeta.ops.table.saving import tables_saved_elsewhere
from gmeta.ops.table.snapshot import TableSnapshot
from gmeta.ops.table.statistics import Statistics
from gmeta.ops.trie.beam_step import TrieStep, trie_step
from gmeta.ops.trie.child_log_probs import trie_log_probs
from gmeta.ops.trie.draws import GumbelStep, TrieNoise, trie_gumbel_step, trie_sample

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
