"""Looks up the features of a batch in their tables."""

__all__: list[str] = []
