"""Published models and recipes.

`cbml_model`, `meta_emb`, `dlrm_model` and `dcn_model` are published models, `factor_model` is the recipe for
cold start, and `softmax_blocks` has the backbones of SASRec and LiGR.
"""

__all__: list[str] = []
