"""Readers of stores of users' histories."""

__all__: list[str] = []
