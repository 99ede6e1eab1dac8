"""The files of a sharded checkpoint. This package doesn't import TensorFlow, so any tool can read them."""

__all__: list[str] = []
