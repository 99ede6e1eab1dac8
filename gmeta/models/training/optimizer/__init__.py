"""Optimizes dense weights and tables in one step."""
