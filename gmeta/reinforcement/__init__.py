"""Training of policies by rewards."""

__all__: list[str] = []
