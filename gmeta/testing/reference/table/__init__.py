"""References of tables and what their rows go through."""

__all__: list[str] = []
