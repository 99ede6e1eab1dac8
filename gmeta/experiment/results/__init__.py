"""What an experiment found: metrics, their spread over seeds, and their file."""

__all__: list[str] = []
