"""References of the readers."""
