"""What a rank and its launcher say to each other: rendezvous, notes, membership of elastic jobs."""

__all__: list[str] = []
