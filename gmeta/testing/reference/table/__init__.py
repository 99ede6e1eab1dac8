"""References of tables and what their rows go through."""
