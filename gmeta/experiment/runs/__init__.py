"""Trains the runs of an experiment and resumes them."""
