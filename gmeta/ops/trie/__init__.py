"""Search in tries of codes."""

from gmeta.ops.trie.beam_step import TrieStep, trie_step
from gmeta.ops.trie.child_log_probs import trie_log_probs

__all__ = ["TrieStep", "trie_log_probs", "trie_step"]
