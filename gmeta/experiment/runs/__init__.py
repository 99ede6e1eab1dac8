"""Training of an experiment's runs: starting and resuming them."""

__all__: list[str] = []
