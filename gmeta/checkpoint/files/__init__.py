"""The files of a sharded checkpoint; imports no TensorFlow, so any tool may read them."""

__all__: list[str] = []
