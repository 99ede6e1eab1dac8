"""Cutting groups of rows into support and query sets, or into histories and exposures."""

__all__: list[str] = []
