"""Layers over jagged sequences: HSTU, FuXi, and their stack."""

__all__: list[str] = []
