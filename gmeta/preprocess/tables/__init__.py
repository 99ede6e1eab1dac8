"""Reads tables of CSV, JSON and Parquet files."""
