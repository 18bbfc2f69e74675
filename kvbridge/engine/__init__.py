"""What inference engines import: `PrefillEngine` and `DecodeEngine`, views of the pools, adapters."""

from kvbridge.engine.decode import DecodeEngine, DecodeRoom
from kvbridge.engine.prefill import PrefillEngine, PrefillRoom

__all__ = ["DecodeEngine", "DecodeRoom", "PrefillEngine", "PrefillRoom"]
