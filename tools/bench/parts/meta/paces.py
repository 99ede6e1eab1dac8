"""One rank of the pipeline benchmark: trains a model by several pipelines in turn, and times them."""

from __future__ import annotations

import json

import gmeta
from gmeta.core import collectives
from gmeta.core.collectives.lane import lane_kind

import tensorflow as tf
from parts.jobs import job_arguments
from parts.meta.outer_rules import outer_rule
from parts.meta.rank import Pace, dataset, meta_model


def main() -> None:
    """Train each variant for an epoch, repeatedly; rank 0 writes milliseconds a step.

    It also writes the bytes of the optimizer's state on the rank that has most.
    """
    out, settings = job_arguments()
    here = gmeta.init()
    trainings = {}
    for name, own in settings["variants"].items():
        of_variant = {**settings, **own}
        data = dataset(of_variant, settings["tasks"] * here.size)
        rule = of_variant.get("outer", "allreduce")
        trainings[name] = meta_model(of_variant), data, Pace(), rule
    for _ in range(1 + settings["rounds"]):  # the first traces
        for model, data, pace, rule in trainings.values():
            with outer_rule(rule):
                model.fit(data, epochs=1, callbacks=[pace], verbose=0)
    state = {
        name: max(
            collectives.allgather_objects(sum(each.numpy().nbytes for each in model.optimizer.variables))
        )
        for name, (model, *_) in trainings.items()
    }
    if here.rank == 0:
        paces = {
            name: [1e3 * seconds / settings["steps"] for seconds in pace.seconds[1:]]
            for name, (*_, pace, _) in trainings.items()
        }
        lanes = [lane_kind("cpu"), lane_kind("gpu")]
        gpus = len(tf.config.get_visible_devices("GPU"))
        found = {"paces": paces, "gpus": gpus, "lanes": lanes, "optimizer_bytes": state}
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
