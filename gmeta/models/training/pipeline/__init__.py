"""Fetches the rows of the batches to come while a batch computes."""

__all__: list[str] = []
