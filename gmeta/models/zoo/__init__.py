"""Published models: MeLU, CBML, MetaEmb, DLRM."""

__all__: list[str] = []
