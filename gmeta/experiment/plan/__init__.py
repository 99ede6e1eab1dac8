"""The plan of an experiment: its data, columns, methods and seeds."""

__all__: list[str] = []
