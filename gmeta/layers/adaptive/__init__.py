"""Layers whose weights adapt to a task."""
