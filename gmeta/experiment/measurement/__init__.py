"""Measurement of methods and baselines on held-out tasks."""

__all__: list[str] = []
