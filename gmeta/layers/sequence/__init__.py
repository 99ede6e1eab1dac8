"""Layers over jagged sequences.

`block` has the base classes of blocks and stacks, and the trained biases of attention, `hstu` and `fuxi` the
published blocks, `stack` their stacks, and `reading` what is kept to append tokens.
"""

__all__: list[str] = []
