"""Starts the ranks of a job, on one machine or several, and restarts them after a loss.

- `local_ranks` starts a fixed number of ranks, `elastic_ranks` a changing number.
- `meeting` is where ranks find each other: Horovod's rendezvous or gmeta's own store.
- `rank_processes` is the process of a rank, here or over ssh.
- `horovodrun` wraps Horovod's launcher with a secret.
"""

__all__: list[str] = []
