"""Layers for several labels: `mmoe` has experts and their gates, `task_heads` a tower for each task."""

__all__: list[str] = []
