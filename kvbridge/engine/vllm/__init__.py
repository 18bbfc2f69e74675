"""vLLM's KV connector, on `engine.kit`. Only `connector` imports vLLM."""

from __future__ import annotations

from kvbridge.engine.kit import Product

NAME = "KvbridgeConnector"
VLLM = Product(
    "vLLM", "vllm", "kv_connector_extra_config", "--kv-transfer-config", "--block-size", "VLLM_KV_CACHE_LAYOUT=HND"
)


def register() -> None:
    """Make `"kv_connector": "KvbridgeConnector"` known. vLLM calls this general plugin, perhaps more than once a process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415 - only vLLM calls this

    if NAME not in KVConnectorFactory._registry:  # noqa: SLF001 - registering twice is an error
        KVConnectorFactory.register_connector(NAME, f"{__name__}.connector", NAME)
