"""Trains a Keras model with its tables, on one rank or many."""

__all__: list[str] = []
