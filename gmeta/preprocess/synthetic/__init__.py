"""Generation of synthetic data to try gmeta on."""

__all__: list[str] = []
