"""Trains the runs of an experiment and resumes them."""

__all__: list[str] = []
