"""Models that generate the code of the next item, digit by digit."""

__all__: list[str] = []
