"""Search in tries of codes."""

from gmeta.ops.trie.beam_step import TrieStep, trie_step

__all__ = ["TrieStep", "trie_step"]
