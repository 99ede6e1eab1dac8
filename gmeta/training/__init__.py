"""Training runs, their checkpoints, and what is measured after them."""
