"""Dynamic hash tables of embedding rows, their records and snapshots."""

__all__: list[str] = []
