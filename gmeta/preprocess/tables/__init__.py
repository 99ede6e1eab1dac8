"""Reading of tables of CSV, JSON and Parquet files."""

__all__: list[str] = []
