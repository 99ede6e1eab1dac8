"""Gives every rank the initial weights of one, and every rank's own state to all before one saves it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import tensorflow as tf

from gmeta.core.collectives.agreement import check_agreement
from gmeta.core.collectives.objects import broadcast_bytes, check_root
from gmeta.core.collectives.place import world
from gmeta.core.keras import submodules

_PIECE = 64 << 20  # bytes of weights in one broadcast


def broadcast_variables(variables: Sequence[tf.Variable], root: int = 0) -> None:
    """Give every rank's variables the values that they have on rank `root`.

    Variables are matched by their position in the sequence, because their names may depend on what a rank has
    created before. They travel as bytes, 64 MB per collective.

    Args:
      variables: Numeric or boolean, the same shapes and types on all ranks.
      root: The rank whose values are sent.

    Raises:
      ConfigError: The ranks' variables differ in number, shape or type; the message names both.
      CollectiveError: A rank has ended, or called something else.
    """
    here = world()
    check_root(root)
    if here.size == 1:
        return
    forms = {f"variable {i}": f"{tuple(v.shape)} {v.dtype.name}" for i, v in enumerate(variables)}
    advice = "build the same model on every rank before its weights are broadcast"
    check_agreement({"number of variables": str(len(forms)), **forms}, advice=advice)
    values = [variable.numpy() for variable in variables]
    sent = b"".join(value.tobytes() for value in values) if here.rank == root else b""
    size = sum(value.nbytes for value in values)
    received = bytearray(size)
    for start in range(0, size, _PIECE):
        piece = sent[start : start + _PIECE]
        received[start : start + _PIECE] = broadcast_bytes(piece, root, doing="broadcast_variables")
    if here.rank != root:
        offset = 0
        for variable, value in zip(variables, values, strict=True):
            flat = np.frombuffer(received, value.dtype, count=value.size, offset=offset)
            variable.assign(flat.reshape(value.shape))
            offset += value.nbytes


@runtime_checkable
class RankState(Protocol):
    """A part of a model that one rank can save for all, once they have told each other theirs."""

    def gather_ranks(self) -> None:
        """Tell all ranks the state of all ranks; all must call this together, between two steps."""


def gather_states(model: tf.Module) -> None:
    """Gather the model, if it is such a part, and all such parts of it.

    Call this before one rank's variables are saved, or sent to the others.
    """
    for part in (model, *submodules(model)):
        if isinstance(part, RankState):
            part.gather_ranks()
