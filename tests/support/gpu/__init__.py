"""Kernels by their C interface, without TensorFlow."""
