"""Export of a trained model from a run's folder to a version of a served model."""

from __future__ import annotations

from pathlib import Path

from gmeta.core.errors import ConfigError
from gmeta.experiment.runs.all_runs import load_trained
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
      out: The model's base path, in TensorFlow Serving's terms.
      method: The run's first method by default.
      seed: The run's first seed by default.
      version: One more than the highest existing version by default.
      unknown: See `gmeta.export.unknown_ids.Unknown`.
      steps: See `gmeta.export.meta_models`, also for the arguments below.
      dtype: The dtype of the deltas that a client gets to keep.
      stale: What happens to deltas that came from another version.

    Raises:
      ConfigError: The run has no such method or seed, or the version already exists.
      DataError: The model isn't trained to the end.
    """
    config, _ = run.load()
    method = next(iter(config.methods)) if method is None else method
    if method not in config.methods:
        raise ConfigError(f"{run.path} has no method {method!r}; it has {', '.join(config.methods)}")
    seed = config.seeds[0] if seed is None else seed
    if seed not in config.seeds:
        raise ConfigError(f"{run.path} has no seed {seed}; it has {', '.join(map(str, config.seeds))}")
    model, _ = load_trained(config, run, method, seed)
    folder = out / str(next_version(out) if version is None else version)
    signatures = meta_signatures(
        model, steps=steps, dtype=dtype, stale=stale, answer=config.label, of_logits=config.loss != "mse"
    )
    return export_model(model, folder, signatures=signatures, unknown=unknown)


def next_version(base: Path) -> int:
    """Return one more than the highest version in a model's base path; 1 if there is none."""
    found = base.iterdir() if base.is_dir() else ()
    return 1 + max((int(path.name) for path in found if path.name.isdecimal()), default=0)
