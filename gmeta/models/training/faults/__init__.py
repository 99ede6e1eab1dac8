"""Finds NaN and bad ids in a batch, and names them."""

__all__: list[str] = []
