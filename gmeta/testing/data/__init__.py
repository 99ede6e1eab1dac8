"""Data of tests: files, batches and fixtures."""
