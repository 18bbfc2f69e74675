"""Engines that kvbridge knows well enough to fill and read their caches itself.

`transformers` and `deepseek_v4` need the extra of the same name as the former; `synthetic` needs nothing.
"""
