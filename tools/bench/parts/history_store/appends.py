"""The cost of appends and compactions, and of reading afterwards."""

from __future__ import annotations

import numpy as np
from harness import Result
from parts.history_store.days import Grown
from parts.history_store.reads import fetch, shuffled

_LONGEST = 1_000
_LOOKUPS = 20_000


def measure(grown: Grown) -> list[Result]:
    """Return the figures of the part ``append``."""
    late = grown.requests[np.flatnonzero(grown.requests.generation > grown.days // 2)]
    lookups = shuffled(late)[slice(0, _LOOKUPS)]
    of_store = "% of the store"
    return [
        Result("history/append/share", 100 * grown.written[-1] / grown.appended, of_store),
        Result("history/append/share/mean_of_9", 100 * grown.written[-9:].mean() / grown.appended, of_store),
        Result("history/append/written", grown.written.sum() / grown.appended, "times the store"),
        Result("history/append/events", grown.append_rate, "events/s"),
        Result("history/append/day", grown.day_seconds, "s"),
        Result("history/compact/events", grown.compact_rate, "events/s"),
        Result("history/reads_per_lookup", fetch(grown, lookups, _LONGEST).reads, "reads"),
        Result(
            "history/reads_per_lookup/appended", fetch(grown, lookups, _LONGEST, grown.days).reads, "reads"
        ),
    ]
