"""vLLM's general plugin: makes the connector known by its name, in every process of vLLM.

Owns: the name. Must not know: the connector, which is imported only where it is used.
"""

from __future__ import annotations

NAME = "KvbridgeConnector"


def register() -> None:
    """Make `"kv_connector": "KvbridgeConnector"` known. Called by vLLM, perhaps more than once a process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415 - only vLLM calls this

    if NAME not in KVConnectorFactory._registry:  # noqa: SLF001 - registering twice is an error
        KVConnectorFactory.register_connector(NAME, "kvbridge.engine.adapters.vllm.connector", NAME)
