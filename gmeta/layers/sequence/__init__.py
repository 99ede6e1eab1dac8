"""Layers over jagged sequences: HSTU, FuXi, and their stack."""
