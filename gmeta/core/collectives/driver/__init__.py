"""Communication between a rank and its launcher: rendezvous, notes, membership of elastic jobs."""

__all__: list[str] = []
