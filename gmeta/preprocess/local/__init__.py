"""Prepares data on one machine, with DuckDB."""

__all__: list[str] = []
