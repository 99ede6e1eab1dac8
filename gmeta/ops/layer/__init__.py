"""The other ops of an HSTU layer: norms, gates, residual sums."""

__all__: list[str] = []
