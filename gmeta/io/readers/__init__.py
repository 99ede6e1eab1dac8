"""Reads prepared data sets.

- `row_reader` and `group_reader` read rows and groups, and `cut_reader` tasks and sequences.
- `prepared_split`: the files of a split.
- `read_options`, `position` and `epoch`: the order of reading, and its progress.
- `balance` makes elements of equal cost, and `remote` supports remote file systems.
"""

__all__: list[str] = []
