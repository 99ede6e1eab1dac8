"""The CUDA kernels by their C interface, for tests without TensorFlow."""

__all__: list[str] = []
