"""What `fit` does: steps, optimizers, pipelines, ranks, and the guards of a training."""

__all__: list[str] = []
