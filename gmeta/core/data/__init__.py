"""The names of tables: `named_tables` finds the rows of a table that a user names."""

__all__: list[str] = []
