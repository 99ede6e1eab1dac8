"""Runs of several ranks, processes and jobs in tests."""
