"""Reads prepared data sets: groups, tasks, sequences and rows."""
