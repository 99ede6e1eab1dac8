"""Models over users' histories: next items, generative ranking, and both with meta-learning."""

__all__: list[str] = []
