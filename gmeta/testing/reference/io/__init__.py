"""References of the readers."""

__all__: list[str] = []
