"""The report of an experiment: one page that opens without network."""

__all__: list[str] = []
