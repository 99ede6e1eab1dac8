"""Inner and outer loops over the tasks of a batch."""

__all__: list[str] = []
