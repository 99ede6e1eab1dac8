"""Optimizes dense weights and tables in one step."""

__all__: list[str] = []
