"""Code that all packages use: errors, configuration, native libraries, collectives, the choice of Keras."""

__all__: list[str] = []
