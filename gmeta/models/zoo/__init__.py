"""Models of the literature: MeLU, CBML, MetaEmb, DLRM."""
