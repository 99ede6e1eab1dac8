"""The plan in its plainest form, with everything in memory, as a reference for engines."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gmeta.core.data_manifest import Shard
from gmeta.preprocess.config import PlanConfig, Progress
from gmeta.preprocess.plan import placement as plan
from gmeta.preprocess.plan.outcome import EngineResult, refuse_empty_splits, refuse_repeated
from gmeta.preprocess.shards.data_set import shard_name, write_shard
from gmeta.preprocess.source import NUMBER, BadRecords, Source, join_rows, part, row_count, single, take

_ROWS = 65_536  # rows written at once


def run(
    source: Source, config: PlanConfig, bad: BadRecords, progress: Progress, folder: Path
) -> EngineResult:
    """Prepare all rows of ``source`` and write the shards into ``folder``."""
    spec = source.spec
    rows = join_rows([*source.chunks(bad, progress)])
    rows = take(rows, plan.row_order(rows, (*spec.order, NUMBER)))
    if spec.unique:
        rows = refuse_repeated(rows, source, bad)
    del rows[NUMBER]
    task = single(rows, spec.task)
    tasks, sizes = np.unique(task, return_counts=True)
    source.check(tasks, bad)
    refuse_empty_splits(tasks, sizes, config, source.path)

    total_sizes = sizes[np.searchsorted(tasks, task)]
    rows[spec.batch] = plan.batch_of(plan.positions(task), total_sizes, config.batch_rows)
    rows = take(rows, np.flatnonzero(plan.select_tasks(total_sizes, config)))
    place = plan.place(single(rows, spec.task), single(rows, spec.batch), config)
    order = np.lexsort((rows[spec.batch], rows[spec.task], place.key, place.shard, place.split))
    rows = take(rows, order)
    split, shard = place.split[order], place.shard[order]
    shards: dict[str, list[Shard]] = {}
    total = row_count(rows)
    progress("write", 0, total)
    for number, name in enumerate(plan.splits(config)):
        shards[name] = []
        for index in range(config.shards):
            start, stop = np.searchsorted(
                split * config.shards + shard, number * config.shards + index + np.arange(2)
            )
            path = folder / shard_name(name, index, config.shards)
            shards[name].append(
                write_shard(path, spec.schema, config.layout, [part(rows, start, stop)], config.codec)
            )
            if stop < total:
                progress("write", int(stop), total)
    progress("write", total, total)
    return EngineResult.of(shards, source, config, tasks, sizes)
