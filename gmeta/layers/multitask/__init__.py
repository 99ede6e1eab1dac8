"""Mixtures of experts and heads of several tasks."""
