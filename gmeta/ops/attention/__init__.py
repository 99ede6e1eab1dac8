"""Attention over jagged sequences."""

__all__: list[str] = []
