"""Native ops and what they are set up with.

The dynamic embedding table is `HashTable`; `reference` holds the same ops in NumPy.
"""

from gmeta.ops.attention_mask import AttentionMask as AttentionMask
from gmeta.ops.dedup_alltoall import OwnedKeys as OwnedKeys
from gmeta.ops.dedup_alltoall import PackedRows as PackedRows
from gmeta.ops.dedup_alltoall import RoutedKeys as RoutedKeys
from gmeta.ops.dedup_alltoall import pack_rows as pack_rows
from gmeta.ops.dedup_alltoall import receive_keys as receive_keys
from gmeta.ops.dedup_alltoall import route_keys as route_keys
from gmeta.ops.dedup_alltoall import unpack_rows as unpack_rows
from gmeta.ops.frozen_table import FrozenTable as FrozenTable
from gmeta.ops.frozen_table import UnknownRows as UnknownRows
from gmeta.ops.hash_table import HashTable as HashTable
from gmeta.ops.hash_table import Lookup as Lookup
from gmeta.ops.hstu_attention import bias_attention as bias_attention
from gmeta.ops.hstu_attention import hstu_attention as hstu_attention
from gmeta.ops.initializers import Constant as Constant
from gmeta.ops.initializers import Initializer as Initializer
from gmeta.ops.initializers import Normal as Normal
from gmeta.ops.initializers import TruncatedNormal as TruncatedNormal
from gmeta.ops.initializers import Uniform as Uniform
from gmeta.ops.initializers import Zeros as Zeros
from gmeta.ops.jagged import Jagged as Jagged
from gmeta.ops.merge_keys import merge_keys as merge_keys
from gmeta.ops.optimizers import SGD as SGD
from gmeta.ops.optimizers import Adagrad as Adagrad
from gmeta.ops.optimizers import Adam as Adam
from gmeta.ops.optimizers import AdamW as AdamW
from gmeta.ops.optimizers import Ftrl as Ftrl
from gmeta.ops.optimizers import Momentum as Momentum
from gmeta.ops.optimizers import RowWiseAdagrad as RowWiseAdagrad
from gmeta.ops.optimizers import SparseOptimizer as SparseOptimizer
from gmeta.ops.policies import LFU as LFU
from gmeta.ops.policies import LRU as LRU
from gmeta.ops.policies import TTL as TTL
from gmeta.ops.policies import Admission as Admission
from gmeta.ops.policies import Always as Always
from gmeta.ops.policies import Bloom as Bloom
from gmeta.ops.policies import CountAdmission as CountAdmission
from gmeta.ops.policies import Eviction as Eviction
from gmeta.ops.policies import MinNorm as MinNorm
from gmeta.ops.policies import ProbabilityAdmission as ProbabilityAdmission
from gmeta.ops.policies import TwoPrecisions as TwoPrecisions
from gmeta.ops.portable import initial_rows_of as initial_rows_of
from gmeta.ops.portable import portable_ops as portable_ops
from gmeta.ops.records import AdmissionState as AdmissionState
from gmeta.ops.records import FilterShards as FilterShards
from gmeta.ops.records import Records as Records
from gmeta.ops.records import ShardRecords as ShardRecords
from gmeta.ops.relative_bias import RelativeBias as RelativeBias
from gmeta.ops.relative_bias import time_bucket as time_bucket
from gmeta.ops.statistics import Statistics as Statistics
from gmeta.ops.table_saving import tables_saved_elsewhere as tables_saved_elsewhere
from gmeta.ops.unique import Unique as Unique
from gmeta.ops.unique import unique as unique
