"""Workers that read for those who train: pieces of an epoch, each element exactly once.

- `channel` carries messages, `announcements` holds the workers' addresses and the key that both sides know.
- `worker_server` is a worker: it reads pieces for whoever asks.
- `worker_pool` knows the workers of one who trains, and `scaled_pool` starts and stops them; `pool_size`
  says when.
- `lanes` reads the pieces of an epoch from workers, `served_position` is how far training has got, and
  `served_epochs` makes a dataset of both. `base_batches` makes large batches of small ones.
"""

__all__: list[str] = []
