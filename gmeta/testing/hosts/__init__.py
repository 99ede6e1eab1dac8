"""Several machines out of one: Linux namespaces joined by wires of a stated rate, and ranks on them."""

__all__: list[str] = []
