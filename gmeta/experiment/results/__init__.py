"""The results of an experiment: metrics, their spread over seeds, and their file."""

__all__: list[str] = []
