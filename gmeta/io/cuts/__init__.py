"""Cuts groups of rows: into support and query sets, into histories and exposures."""

__all__: list[str] = []
