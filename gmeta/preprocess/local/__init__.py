"""Prepares data on one machine, with DuckDB."""
