"""Makes batches, and the work of ranks, cost about equally much."""

__all__: list[str] = []
