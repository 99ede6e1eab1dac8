"""Hashes, merges and deduplicates keys."""
