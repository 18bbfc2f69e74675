"""kvbridge moves a request's KV cache from prefill to decode, and keeps it there. Start with ARCHITECTURE.md."""

__version__ = "0.1.0"
