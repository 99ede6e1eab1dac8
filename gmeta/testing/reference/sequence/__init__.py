"""References of layers over sequences."""

__all__: list[str] = []
