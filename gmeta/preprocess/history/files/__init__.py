"""The files of a store of histories: generations, their shards, stripes of events, and indexes."""

__all__: list[str] = []
