"""Engines that kvbridge knows well enough to fill and read their caches itself.

`transformers`, `deepseek_v4`, `sparse_deepseek_v4` and `selection_watch` need the extra of the first one's name; `synthetic`
needs nothing.
"""
