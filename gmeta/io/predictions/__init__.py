"""Writes a model's predictions for a prepared split, in parts that are resumed after an interruption."""

__all__: list[str] = []
