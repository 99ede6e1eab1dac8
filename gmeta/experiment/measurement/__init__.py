"""Measures methods and baselines on held-out tasks."""
