"""Balancing: batches of about equal cost, and ranks with about equal work."""

__all__: list[str] = []
