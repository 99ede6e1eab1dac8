"""Meta-learning models: the learner, the adapter, and the Keras model over them."""

__all__: list[str] = []
