"""Writes stores of users' histories.

- `append` adds events in this process, `cluster_append` and `streaming_append` on a cluster.
- `spec` describes a store, and `generation` opens and commits its generations.
- `shard_writer` and `shard_reader`: the files.
- `example_sets` and `example_writer`: examples that point into a store.
- `rebuild` rewrites a store, and `reading` exports and checks it.
"""

__all__: list[str] = []
