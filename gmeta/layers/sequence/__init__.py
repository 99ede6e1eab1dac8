"""Layers over jagged sequences: HSTU, FuXi, and stacks of their blocks."""

__all__: list[str] = []
