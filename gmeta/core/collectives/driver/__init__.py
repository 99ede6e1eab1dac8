"""Communication of a rank with its launcher and other processes: rendezvous, greetings, notes."""

__all__: list[str] = []
