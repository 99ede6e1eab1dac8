"""Published models and recipes.

`melu_model`, `cbml_model`, `meta_emb` and `dlrm_model` are published models, `factor_model` is the
recipe for cold start, `softmax_blocks` has the backbones of SASRec and LiGR, and `scaled_numbers` scales
columns of numbers inside their networks.
"""

__all__: list[str] = []
