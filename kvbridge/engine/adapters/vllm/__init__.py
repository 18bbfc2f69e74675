"""vLLM: its KV cache tensors as a geometry and regions, and which of its settings a transfer cannot serve. Imports no vLLM."""
