"""Layers over jagged sequences.

`block` has the base classes of blocks and stacks, and the trained biases of attention, `stack` stacks of
blocks and FuXi, `hstu` HSTU, and `reading` what is kept to append tokens.
"""

__all__: list[str] = []
