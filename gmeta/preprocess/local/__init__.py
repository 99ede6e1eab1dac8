"""Preparation of data on one machine.

`preparation` prepares a data set completely or not at all, `duckdb_engine` groups its rows by task, and
`group_sorter` sorts batches into the order of the shards.
"""

__all__: list[str] = []
