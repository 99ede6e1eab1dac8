"""Reading of MovieLens folders."""

__all__: list[str] = []
