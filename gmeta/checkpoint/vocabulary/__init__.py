"""Tables as plain columns in files, which other stores, frameworks and pandas read and write."""

__all__: list[str] = []
