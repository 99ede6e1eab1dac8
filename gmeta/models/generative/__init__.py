"""Models that generate the code of the next item, digit by digit.

- `code_model`: the base class; `generative_retriever` and `flat_retriever`: the two models.
- `code_tables`: the codes of a catalogue as a trie.
- `digit_decoder` computes queries for digits, and their probabilities, and searches and draws in the trie.
"""

__all__: list[str] = []
