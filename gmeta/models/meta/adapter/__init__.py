"""Adapts a trained model to tasks, and serializes what adapted."""

__all__: list[str] = []
