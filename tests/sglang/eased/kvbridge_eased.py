"""Changes that SGLang 0.5.23 needs to run its own transfer on a processor: a plugin for all servers of the tests."""

from __future__ import annotations


def register() -> None:
    """Called by SGLang in each process, before it starts anything."""
    from sglang.srt.disaggregation.mooncake import conn

    # Otherwise the sender wants pinned memory and CUDA events for its page ids.
    conn.MooncakeKVSender.supports_host_tensor_indices = False
