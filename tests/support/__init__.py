"""Shared by tests: generated data, reference implementations, processes and machines to run on."""
