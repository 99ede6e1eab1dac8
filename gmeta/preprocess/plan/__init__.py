"""Plans a data set: numbers of columns, splits, and where each group lies."""

__all__: list[str] = []
