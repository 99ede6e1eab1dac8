"""Settings of a `gmeta.ops.HashTable`: which ids get rows, which rows go, and how rows are stored.

`row_lifetimes` chooses the ids that get a row and the rows that are removed, and `storage` the precision of
rows and the memory that holds them. Settings are equal if their fields are; the decisions are native
(``admission.h``, ``eviction.h`` and ``rows.h`` in ``ops/table``), and in plain Python in
`support.reference.table`. All are deterministic: the same batches in the same order give the same table,
whatever the number of threads.
"""

from gmeta.core.imports import load_lazily
from gmeta.policies.row_lifetimes import LFU, LRU, TTL, Bloom, CountAdmission, MinNorm, ProbabilityAdmission
from gmeta.policies.storage import Tiers, TwoPrecisions

_MOVED = {
    "Admission": "gmeta.policies.row_lifetimes",
    "Always": "gmeta.policies.row_lifetimes",
    "Eviction": "gmeta.policies.row_lifetimes",
}
"""Old name -> the module that has it now, for one release."""

__all__ = [
    "LFU",
    "LRU",
    "TTL",
    "Bloom",
    "CountAdmission",
    "MinNorm",
    "ProbabilityAdmission",
    "Tiers",
    "TwoPrecisions",
]

__getattr__, __dir__ = load_lazily(__name__, {}, _MOVED)
