"""Where readers begin: epochs, positions and parts of them."""

__all__: list[str] = []
