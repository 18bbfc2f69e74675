"""vLLM's KV connector: its tensors as a geometry and regions, its requests as rooms. Only `connector` and `metrics` import vLLM."""

from __future__ import annotations

NAME = "KvbridgeConnector"


def register() -> None:
    """Make `"kv_connector": "KvbridgeConnector"` known: a general plugin. vLLM calls it, perhaps more than once a process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415 - only vLLM calls this

    if NAME not in KVConnectorFactory._registry:  # noqa: SLF001 - registering twice is an error
        KVConnectorFactory.register_connector(NAME, f"{__name__}.connector", NAME)
