"""Which ids a `gmeta.ops.HashTable` gives a row of their own, which rows go, how precise and where they are.

They are settings, equal if their fields are; the decisions are native (``admission.h``, ``eviction.h`` and
``rows.h`` in ``ops/table``), and in plain Python in `support.reference.table`. All are deterministic:
the same batches in the same order give the same table, whatever the number of threads.
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
