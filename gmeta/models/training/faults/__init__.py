"""Finds NaN and bad ids in a batch, and names them."""
