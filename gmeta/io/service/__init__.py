"""Workers that read for training processes: pieces of an epoch, each element exactly once.

- `channel` carries messages, `announcements` holds the workers' addresses and the key that both sides know.
- `worker_server` is a worker: it reads pieces on request.
- `worker_pool` holds the workers of a training process, and `scaled_pool` starts and stops them; `pool_size`
  says when.
- `lanes` reads the pieces of an epoch from workers, `served_position` is the progress of training, and
  `served_epochs` makes a dataset of both. `base_batches` makes large batches of small ones.
"""

__all__: list[str] = []
