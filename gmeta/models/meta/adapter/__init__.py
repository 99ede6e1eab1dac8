"""Adapts a trained model to tasks, and serializes what adapted."""
