"""Reads MovieLens folders."""

__all__: list[str] = []
