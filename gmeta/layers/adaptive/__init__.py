"""Layers whose weights adapt to a task."""

__all__: list[str] = []
