"""Reads prepared data sets: groups, tasks, sequences and rows."""

__all__: list[str] = []
