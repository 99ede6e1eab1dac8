"""Models of the literature: MeLU, CBML, MetaEmb, DLRM."""

__all__: list[str] = []
