"""The plan of a preparation, as functions that all engines share.

`column_types` decides the types of columns, `column_values` converts columns and `normalisation` records,
`texts` collects hashed texts, `ranges` cuts the ordered rows into ranges, `placement` computes the
place of each row, and `outcome` is an engine's result.
"""

__all__: list[str] = []
