"""Sends keys, rows and gradients to the ranks that hold them."""

__all__: list[str] = []
