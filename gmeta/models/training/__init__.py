"""Trains a Keras model with its tables, on one rank or many."""
