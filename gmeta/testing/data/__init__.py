"""Data of tests: files, batches and fixtures."""

__all__: list[str] = []
