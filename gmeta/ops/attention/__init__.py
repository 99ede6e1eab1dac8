"""Attention over jagged sequences."""
