"""vLLM: its KV cache tensors as a geometry and regions, and which of its settings a transfer cannot serve.

Only `connector`, `metrics` and `plugin` import vLLM.
"""
