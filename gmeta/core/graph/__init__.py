"""Helpers for code that runs inside a TensorFlow graph."""
