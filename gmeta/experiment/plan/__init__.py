"""Plans an experiment: its data, columns, methods and seeds."""
