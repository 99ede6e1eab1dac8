"""Prepares data on a cluster: Spark and Hadoop Streaming."""

__all__: list[str] = []
