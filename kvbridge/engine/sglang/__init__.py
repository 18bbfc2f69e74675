"""SGLang's transfer backend `kvbridge`, on `engine.kit`. Only `backend`, `pools` and `plugin` import SGLang."""

from __future__ import annotations

from kvbridge.engine.kit import Product

BACKEND = "kvbridge"
"""The value of `--disaggregation-transfer-backend`."""
SETTINGS_FILE = "KVBRIDGE_SGLANG_CONFIG"
"""Environment variable with keys of a daemon's configuration for the node: the path of a YAML file, or a mapping in braces."""
SGLANG = Product(
    "SGLang",
    "sglang",
    f"the file that {SETTINGS_FILE} names",
    "--port",
    "--page-size",
    "SGLANG_USE_HND_KVCACHE=0",
    # A scheduler takes requests between two chunks, and decode cannot compute the prompt instead.
    {"early_offer_s": 60.0},
)
