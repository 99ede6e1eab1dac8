"""Appends to a store of histories by many workers: on Spark, and as a job of Hadoop Streaming."""

__all__: list[str] = []
