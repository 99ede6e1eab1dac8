"""From a run's folder to a version of a served model."""

from __future__ import annotations

from pathlib import Path

from gmeta.core.errors import ConfigError
from gmeta.experiment.runs.all_runs import trained
from gmeta.experiment.runs.run_folder import RunFolder
from gmeta.export.meta_models import Stale, meta_signatures
from gmeta.export.saved_model import Exported, export_model
from gmeta.export.unknown_ids import Unknown
from gmeta.models.meta.adapter.fast_weights import DeltaDtype


def export_run(
    run: RunFolder,
    out: Path,
    *,
    method: str | None = None,
    seed: int | None = None,
    version: int | None = None,
    unknown: Unknown = "initial",
    steps: int | None = None,
    dtype: DeltaDtype = "float32",
    stale: Stale = "refuse",
) -> Exported:
    """Export one trained model of a run to ``out/version``.

    Args:
      run: A run that is trained to the end.
      out: What TensorFlow Serving calls the model's base path.
      method: The run's first where it isn't said.
      seed: The run's first where it isn't said.
      version: One more than the highest there is, where it isn't said.
      unknown: See `gmeta.export.unknown_ids.Unknown`.
      steps: See `gmeta.export.meta_models`, as for the rest.
      dtype: Of the deltas that a client is given to keep.
      stale: What becomes of deltas that another version has given.

    Raises:
      ConfigError: The run has no such method or seed, or the version is there.
      DataError: The model isn't trained to the end.
    """
    config, _ = run.load()
    method = next(iter(config.methods)) if method is None else method
    if method not in config.methods:
        raise ConfigError(f"{run.path} has no method {method!r}; it has {', '.join(config.methods)}")
    seed = config.seeds[0] if seed is None else seed
    if seed not in config.seeds:
        raise ConfigError(f"{run.path} has no seed {seed}; it has {', '.join(map(str, config.seeds))}")
    model, _ = trained(config, run, method, seed)
    folder = out / str(next_version(out) if version is None else version)
    signatures = meta_signatures(
        model, steps=steps, dtype=dtype, stale=stale, answer=config.label, of_logits=config.loss != "mse"
    )
    return export_model(model, folder, signatures=signatures, unknown=unknown)


def next_version(base: Path) -> int:
    """One more than the highest version in a model's base path; 1 where there is none."""
    found = base.iterdir() if base.is_dir() else ()
    return 1 + max((int(path.name) for path in found if path.name.isdecimal()), default=0)
