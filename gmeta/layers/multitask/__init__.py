"""Mixtures of experts, and heads for several tasks."""

__all__: list[str] = []
