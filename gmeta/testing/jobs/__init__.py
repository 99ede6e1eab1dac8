"""Runs of several ranks, processes and jobs in tests."""

__all__: list[str] = []
