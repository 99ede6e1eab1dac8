"""Initial rows of tables: pure functions of (table seed, key)."""

from gmeta.initializers.distributions import (
    Constant,
    Initializer,
    Normal,
    TruncatedNormal,
    Uniform,
    Zeros,
)

__all__ = ["Constant", "Initializer", "Normal", "TruncatedNormal", "Uniform", "Zeros"]
