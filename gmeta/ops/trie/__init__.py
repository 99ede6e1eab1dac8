"""Search in tries of codes, draws from them, and the probabilities of codes."""

from gmeta.ops.trie.beam_step import TrieStep, trie_step
from gmeta.ops.trie.child_log_probs import trie_log_probs
from gmeta.ops.trie.draws import GumbelStep, TrieNoise, trie_gumbel_step, trie_sample

__all__ = [
    "GumbelStep",
    "TrieNoise",
    "TrieStep",
    "trie_gumbel_step",
    "trie_log_probs",
    "trie_sample",
    "trie_step",
]
