"""Preparation of data on a cluster, with Spark or Hadoop Streaming."""

__all__: list[str] = []
