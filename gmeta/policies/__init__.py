"""Settings of a `gmeta.ops.HashTable`: which ids get rows, which rows go, and how rows are stored.

`admission` chooses the ids that get a row, `eviction` the rows that are removed, and `storage` the precision
of rows and the memory that holds them. Settings are equal if their fields are; the decisions are native
(``admission.h``, ``eviction.h`` and ``rows.h`` in ``ops/table``), and in plain Python in
`support.reference.table`. All are deterministic: the same batches in the same order give the same table,
whatever the number of threads.
"""

from gmeta.policies.admission import Admission, Always, Bloom, CountAdmission, ProbabilityAdmission
from gmeta.policies.eviction import LFU, LRU, TTL, Eviction, MinNorm
from gmeta.policies.storage import Tiers, TwoPrecisions

__all__ = [
    "LFU",
    "LRU",
    "TTL",
    "Admission",
    "Always",
    "Bloom",
    "CountAdmission",
    "Eviction",
    "MinNorm",
    "ProbabilityAdmission",
    "Tiers",
    "TwoPrecisions",
]
