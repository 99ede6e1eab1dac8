"""Brings a step's rows one micro-batch after another, each row once."""

__all__: list[str] = []
