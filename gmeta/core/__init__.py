"""What every room stands on: errors, configuration, native libraries, collectives, the Keras in use."""

__all__: list[str] = []
