"""What the exchanges of a step send and receive: keys one way, rows the other, gradients back."""

__all__: list[str] = []
