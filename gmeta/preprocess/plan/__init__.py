"""The plan of a data set: the numbers in its columns, its splits, and the place of each group."""

__all__: list[str] = []
