"""Helpers for code that runs inside a TensorFlow graph."""

__all__: list[str] = []
