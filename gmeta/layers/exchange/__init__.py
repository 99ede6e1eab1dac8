"""Sends keys, rows and gradients to the ranks that hold them."""
