"""Meta-learning models: the learner, the adapter, and the Keras model over them."""
