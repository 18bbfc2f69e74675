"""Adapters for one engine each: `transformers` and `deepseek_v4` need the extra `transformers`, vLLM loads `vllm`."""
