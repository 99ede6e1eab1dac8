"""Ops that hash, merge and deduplicate keys."""

__all__: list[str] = []
