"""Preparation of data on one machine, with DuckDB."""

__all__: list[str] = []
