"""Reads MovieLens folders."""
