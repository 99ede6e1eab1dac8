"""Mixtures of experts and heads of several tasks."""

__all__: list[str] = []
