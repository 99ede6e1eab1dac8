"""Writing of records, shards and their indexes."""

__all__: list[str] = []
