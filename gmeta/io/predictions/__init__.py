"""Predictions for a whole data set, written as Arrow files by any number of ranks."""

__all__: list[str] = []
