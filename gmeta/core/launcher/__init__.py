"""Starts the ranks of a job, on one machine or several, and starts them again after a loss."""

__all__: list[str] = []
