"""Layers over jagged sequences.

`block` has the base classes of blocks and stacks, `hstu` and `fuxi` the published blocks, `stack` their
stacks, `bias_tables` the trained biases of attention, and `reading` what is kept to append tokens.
"""

__all__: list[str] = []
