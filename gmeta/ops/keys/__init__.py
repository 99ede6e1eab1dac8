"""Hashes, merges and deduplicates keys."""

__all__: list[str] = []
