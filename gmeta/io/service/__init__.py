"""Workers that read for training processes: pieces of an epoch, each element exactly once.

- `worker`: a worker, which reads pieces on request, and its messages with the training process.
- `worker_pool` contains the workers of a training process, and starts and stops them.
- `pieces` reads the pieces of an epoch from workers and counts the progress of training, and
  `served_epochs` makes a dataset of them.
"""

__all__: list[str] = []
