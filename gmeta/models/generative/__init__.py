"""Models that generate the code of the next item, digit by digit.

- `code_model`: the base class; `generative_retriever` and `flat_retriever`: the two models.
- `code_tables`: the codes of a catalogue as a trie; `searches`: beam searches and draws in it.
- `digit_decoder` computes queries for digits, and their probabilities.
"""

__all__: list[str] = []
