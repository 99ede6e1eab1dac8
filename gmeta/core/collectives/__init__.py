"""Collectives over the ranks of a job; the only package that imports Horovod.

A job of N ranks is N processes of the same program. `init` makes this process one of them. If no launcher
started the process, the world is one rank, every collective is the identity, and Horovod isn't imported.

- `entry` and `place`: `init`, the `world` that it joins, and whether Horovod connects it.
- `tensors`, inside a step and in a ``tf.function``: `alltoall`, `allreduce_sum` and others.
- `objects`, between steps: `allgather_objects`, `broadcast_object`, `barrier`, `check_agreement` and others.
- `lane`: gmeta's own channels for steps, with or without Horovod.
- `peers`: how ranks find each other and send objects, by Horovod or by gmeta.
- `rendezvous` and `wire`: how processes find and trust each other, and their messages.
- `elastic`: the messages of an elastic job's ranks to its driver, and their restart.
- `rank_group`: work that fails on all ranks if it fails on one, such as a save.
- `monitoring` and `shared_data`: counts and explanations of errors, and a rank's part of the data.

Importing this package imports neither TensorFlow nor Horovod: the names below are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gmeta.core.collectives.entry import init
from gmeta.core.collectives.place import (
    World,
    built_backends,
    check_init,
    horovod_advice,
    horovod_version,
    import_horovod,
    world,
)
from gmeta.core.imports import load_lazily

if TYPE_CHECKING:
    from gmeta.core.collectives.monitoring import CollectiveCounts, count_collectives, name_failures
    from gmeta.core.collectives.objects import (
        allgather_objects,
        barrier,
        broadcast_object,
        broadcast_variables,
        check_agreement,
        gather_states,
    )
    from gmeta.core.collectives.shared_data import part_of
    from gmeta.core.collectives.tensors import allgather, allreduce_sum, alltoall, reduce_scatter_sum

__all__ = [
    "CollectiveCounts",
    "World",
    "allgather",
    "allgather_objects",
    "allreduce_sum",
    "alltoall",
    "barrier",
    "broadcast_object",
    "broadcast_variables",
    "built_backends",
    "check_agreement",
    "check_init",
    "count_collectives",
    "gather_states",
    "horovod_advice",
    "horovod_version",
    "import_horovod",
    "init",
    "name_failures",
    "part_of",
    "reduce_scatter_sum",
    "world",
]

_LAZY = {
    "CollectiveCounts": "monitoring",
    "allgather": "tensors",
    "allgather_objects": "objects",
    "allreduce_sum": "tensors",
    "alltoall": "tensors",
    "barrier": "objects",
    "broadcast_object": "objects",
    "broadcast_variables": "objects",
    "check_agreement": "objects",
    "count_collectives": "monitoring",
    "gather_states": "objects",
    "name_failures": "monitoring",
    "part_of": "shared_data",
    "reduce_scatter_sum": "tensors",
}
"""Name -> the module that defines it and imports TensorFlow."""

__getattr__, __dir__ = load_lazily(__name__, {name: f"{__name__}.{module}" for name, module in _LAZY.items()})
