"""Histories as of a moment: bytes, reads, appends and speed of a store, and its format beside others.

    python tools/bench/history.py --json FILE
    python tools/bench/history.py --parts formats
    python tools/bench/history.py --parts append bytes --users 100000 --plot FILE

Events are generated, 600 a user on average, with six columns besides the time. Parts:

formats   gmeta's format of a shard beside Parquet and RocksDB, for other users than the parts below

gmeta                 stripes of 256 events in a file, and the index of a shard
parquet_dense         sorted by user and time, with delta encodings and zstd, row groups of 65,536 rows;
                      pyarrow is given the rows of each user, and reads a row group once for a whole call
parquet_dense_small   the same in row groups of 2,048 rows, as pyarrow reads no less than a row group
parquet_light_small   the same without zstd
parquet_plain         neither encoded nor compressed, in row groups of 65,536 rows
parquet_plain_small   the same in row groups of 2,048 rows
parquet_duckdb        the file of parquet_dense, joined with all requests of a call by a query of DuckDB
rocksdb_CODEC         a key for 256 events, whose columns are stored unencoded; by codec of the blocks. An
                      index in memory finds the keys of a call, which are all fetched at once
rocksdb_lz4_iterated  the same without that index: an iterator goes backwards from the moment

A request is for the newest events of a user before a moment, as of the generation of that day: the time and
three more of the eight columns. All forms return the same answers, and each runs on one core and reads files
from the page cache. `long`, `middle` and `short` are at most 3,000, 1,000 and 100 events. A call has 256
requests of random users or, `in_order`, one of each user in ascending order.

bytes_per_event       of files, and of indexes that are stored
scans, events         requests answered in a second, and the events of the answers
gmeta_over_best       gmeta's rate over that of the fastest other form, whatever its bytes
gmeta_over_dense      the same among forms of at most twice gmeta's bytes
history/scan          gmeta's events a second on a core, of whole histories in order

The other parts share a store that 91 daily appends make, and 20 requests a user, each right after an event of
the user. A history has what the store held that morning.

append    append/share       bytes that the 91st append writes, as a share of the store; mean_of_9: of the
                             last nine; append/written: of all appends, in stores
          append/events      events a second and core of one append of all days; append/day: seconds of
                             processor time of a daily append
          compact/events     events a second and core of the compaction
          reads_per_lookup   reads for a history of at most 1,000 events from the compacted store; appended:
                             from the store of 91 appends
bytes     examples/bytes     a prepared data set with a record for each request, without its history; by_user:
                             with a record for all requests of a user
          total/bytes        with the compacted store; both in % of fat rows, a prepared data set with a
                             record for each request and its newest 1,000 events
          total/of_FORM      the same of other fat rows: with records that zstd compresses; with one such
                             record for all requests of a user, and in Parquet, by zstd, ordered by user,
                             beside examples by user
          read/READER/bytes  what a reader fetches from examples and the compacted store, each batch of 256
                             anew; in % of fat rows of 3,000 events, which every reader reads whole. In the
                             order of `gmeta.io.late`; in random order; and with all requests of a user in a
                             batch
          affinity/bytes     bytes from the store in the last order, in % of random order, at 1,000 events
speed     op                 events a second of the native op with all cores, random requests
          throughput/WHAT    how many times as fast a reader is with affinity, with pipelined reads, and with
                             base batches that it joins

Fat rows are written for a sample of users and scaled. Lance isn't compared. rocksdict isn't a dependency;
without it RocksDB is left out: pip install rocksdict==0.3.29
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from harness import Result, parser, report

PARTS = ("formats", "append", "bytes", "speed")


def formats(given: Namespace) -> tuple[list[Result], dict[str, Any]]:
    """Measure the format beside others."""
    from parts.history_formats.contenders import contenders, versions
    from parts.history_formats.events import make_events
    from parts.history_formats.rates import compare

    events = make_events(given.shard_users, given.events)
    with tempfile.TemporaryDirectory() as folder:
        results = compare(events, contenders(Path(folder), events), given.rounds)
    return results, {"shard_users": given.shard_users, "shard_events": len(events), **versions()}


def store(given: Namespace) -> tuple[list[Result], dict[str, Any]]:
    """Measure a store that has grown day by day."""
    from parts.history_store import appends, pace, sizes
    from parts.history_store.days import grow

    results: list[Result] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        grown = grow(folder, given.users, given.events, given.days)
        if "append" in given.parts:
            results += appends.measure(grown)
        if "bytes" in given.parts or given.plot:
            measured = sizes.measure(folder, grown, given.sample)
            results += measured.results()
            if given.plot:
                measured.plot(given.plot)
        if "speed" in given.parts:
            results += pace.measure(folder, grown, given.rounds)
        facts = {"users": given.users, "events": grown.events, "requests": len(grown.requests)}
    return results, {**facts, "sample": given.sample, "days": given.days}


def main() -> None:
    """Measure the named parts."""
    options = parser(__doc__)
    options.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options.add_argument("--users", type=int, default=5_000, help="users of the store (default: %(default)s)")
    options.add_argument("--sample", type=int, default=200, help="users with fat rows (default: %(default)s)")
    options.add_argument(
        "--events", type=int, default=600, help="mean events of a user (default: %(default)s)"
    )
    options.add_argument("--days", type=int, default=91, help="daily appends (default: %(default)s)")
    options.add_argument(
        "--shard-users", type=int, default=4_000, help="users of the shard in formats (default: %(default)s)"
    )
    options.add_argument("--plot", type=Path, help="draw where bytes go into this PNG")
    given = options.parse_args()
    if given.smoke:
        given.__dict__ |= {"users": 40, "days": 10, "sample": 10, "events": 60, "shard_users": 50}
    results: list[Result] = []
    facts: dict[str, Any] = {}
    for measure, parts in ((formats, PARTS[:1]), (store, PARTS[1:])):
        if set(parts) & set(given.parts) or (measure is store and given.plot):
            more, about = measure(given)
            results += more
            facts |= about
    report("Histories at moments", results, given.json, **facts)


if __name__ == "__main__":
    main()
