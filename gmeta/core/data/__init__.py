"""Description of a prepared data set: schema, roles of columns, manifest, index of groups."""

__all__: list[str] = []
