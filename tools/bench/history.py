"""Histories of users at moments: gmeta's own format beside Parquet and RocksDB.

    gmeta bench history --json FILE

A request asks for the newest events of a user before a moment, as the generation of that day knew them: the
time and three more of the eight columns. Events are made up, 600 a user in the mean. All forms store the same
events and, before anything is timed, give the same answers. Each works on one core and reads files that are
in the page cache. `long`, `middle` and `short` are at most 3,000, 1,000 and 100 events. A call has 256
requests of random users or, `in_order`, one of each user in ascending order.

gmeta                 stripes of 256 events in a file, and the index of a shard
parquet_dense         sorted by user and time, with delta encodings and zstd, row groups of 65,536 rows;
                      pyarrow is told which rows a user has, and reads a row group once for all of a call
parquet_dense_small   the same in row groups of 2,048 rows, as pyarrow reads no less than a row group
parquet_light_small   the same without zstd
parquet_plain         neither encoded nor compressed, in row groups of 65,536 rows
parquet_plain_small   the same in row groups of 2,048 rows
parquet_duckdb        the file of parquet_dense, joined with all requests of a call by a query of DuckDB
rocksdb_CODEC         a key for 256 events, whose columns are stored as they are; by codec of the blocks. An
                      index in memory names the keys of a call, and all of them are fetched at once
rocksdb_lz4_iterated  the same without that index: an iterator goes backwards from the moment

bytes_per_event       of files, and of indexes that are stored
scans, events         requests answered in a second, and the events of the answers
gmeta_over_best       gmeta's rate over that of the fastest other form, however many bytes it takes
gmeta_over_dense      the same among forms of at most twice gmeta's bytes
history/scan          gmeta's events a second on a core, of whole histories in order

Lance isn't compared, as the package registry at hand has none. rocksdict isn't a dependency; without it
RocksDB is left out: pip install rocksdict==0.3.29
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from harness import Result, interleave, parser, report
from parts.history_formats.contenders import Form, assert_same, contenders, versions
from parts.history_formats.events import MEAN_EVENTS, Events, make_events, make_requests

LONGEST = {"long": 3_000, "middle": 1_000, "short": 100}
CALL = 256  # requests of random users


def rates(events: Events, forms: dict[str, Form], what: str, rounds: int) -> dict[str, tuple[float, float]]:
    """Time calls in turn, each round with requests of its own.

    Args:
      events: What the forms store.
      forms: Name -> form.
      what: A key of `LONGEST`, with ``_in_order`` behind it for users in ascending order.
      rounds: Timed rounds.

    Returns:
      Name -> requests and events a second, by the median round.
    """
    longest, in_order = LONGEST[what.removesuffix("_in_order")], what.endswith("_in_order")
    count, warm_up = len(events.users) if in_order else CALL, 2
    calls = [make_requests(events, count, seed, in_order=in_order) for seed in range(warm_up + rounds)]
    assert_same(forms, calls[0], longest)
    sizes = [int(forms["gmeta"].scan(call, longest).row_splits[-1]) for call in calls[warm_up:]]
    timed = {
        name: (lambda number, form=form: form.scan(calls[number], longest)) for name, form in forms.items()
    }
    seconds = interleave(timed, rounds=rounds, warm_up=warm_up)
    mean = sum(sizes) / len(sizes)
    return {name: (count / each, mean / each) for name, each in seconds.items()}


def results_of(forms: dict[str, Form], found: dict[str, dict[str, Any]], events: int) -> list[Result]:
    """Turn rates into figures.

    Args:
      forms: Name -> form.
      found: What was asked -> `rates`.
      events: How many are stored.

    Returns:
      The figures.
    """
    results = [
        Result(f"history/formats/{name}/bytes_per_event", form.size / events, "bytes")
        for name, form in forms.items()
    ]
    peers = [name for name in forms if name != "gmeta"]
    dense = [name for name in peers if forms[name].size <= 2 * forms["gmeta"].size]
    for what, rate in found.items():
        best = max(peers, key=rate.__getitem__)
        for name, (scans, read) in rate.items():
            peer = (best, rate[best][0]) if name == "gmeta" else ()
            results.append(Result(f"history/formats/{name}/scans_{what}", scans, "scans/s", *peer))
            results.append(Result(f"history/formats/{name}/events_{what}", read, "events/s"))
        for kind, names in (("best", peers), ("dense", dense)):
            if names:
                ratio = rate["gmeta"][0] / max(rate[name][0] for name in names)
                results.append(Result(f"history/formats/gmeta_over_{kind}_{what}", ratio, "times"))
    return [*results, Result("history/scan", found["long_in_order"]["gmeta"][1], "events/s")]


def main() -> None:
    """Store the events in all forms, and time them."""
    options = parser(__doc__)
    options.add_argument("--users", type=int, default=4_000, help="of the shard (default: %(default)s)")
    options.add_argument(
        "--events", type=int, default=MEAN_EVENTS, help="of a user in the mean (default: %(default)s)"
    )
    given = options.parse_args()
    events = make_events(*((50, 60) if given.smoke else (given.users, given.events)))
    with tempfile.TemporaryDirectory() as folder:
        forms = contenders(Path(folder), events)
        asked = [f"{length}{order}" for order in ("", "_in_order") for length in LONGEST]
        found = {what: rates(events, forms, what, given.rounds) for what in asked}
        results = results_of(forms, found, len(events))
    facts = {"users": len(events.users), "events": len(events), **versions()}
    report("Histories at moments", results, given.json, **facts)


if __name__ == "__main__":
    main()
