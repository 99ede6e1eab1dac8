"""Adaptation of a trained model to tasks, and serialization of the adapted weights."""

__all__: list[str] = []
