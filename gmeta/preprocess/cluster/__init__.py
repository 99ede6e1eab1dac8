"""Prepares data on a cluster: Spark and Hadoop Streaming."""
