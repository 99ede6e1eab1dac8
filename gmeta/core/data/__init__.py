"""What a prepared data set is: schema, roles of columns, manifest, index of groups."""

__all__: list[str] = []
