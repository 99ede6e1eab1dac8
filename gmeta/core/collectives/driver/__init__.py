"""Communication of a rank with its launcher and the other ranks: rendezvous, addresses, notes."""

__all__: list[str] = []
