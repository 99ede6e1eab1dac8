"""Writes records, shards and their indexes."""
