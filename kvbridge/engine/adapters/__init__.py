"""Engines that kvbridge knows well enough to fill and read their caches itself.

`transformers`, `deepseek_v4` and `sparse_deepseek_v4` need the extra of the first one's name. vLLM loads `vllm`, and brings
what that needs.
"""
