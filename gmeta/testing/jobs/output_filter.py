"""What a process says of the machine, and not of itself."""

from __future__ import annotations

import re

_SLOW = re.compile(r"WARNING:tensorflow:Callback method .* is slow compared to the batch time.*\n")


def without_stalls(output: str) -> str:
    r"""Output without what Keras says where the machine stood still within the first batches of a fit.

    Keras compares the time in callbacks' hooks with that of batches, so a pause of the machine in a hook is
    reported as a slow callback.

    Example:
      >>> without_stalls("WARNING:tensorflow:Callback method `f` is slow compared to the batch time (1s).\n")
      ''
    """
    return _SLOW.sub("", output)
