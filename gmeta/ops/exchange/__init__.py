"""Messages of a step's exchanges: keys travel to their owners, rows back, gradients to the owners again."""

__all__: list[str] = []
