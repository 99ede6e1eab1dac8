"""Finds the most tokens of a batch that a device's memory holds, by steps that leave the model as it was."""

__all__: list[str] = []
