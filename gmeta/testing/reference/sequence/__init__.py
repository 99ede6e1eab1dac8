"""References of layers over sequences."""
