"""Changes that SGLang 0.5.23 needs to run its own transfer on a processor: a plugin for all servers of the tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

RECORDED = "KVBRIDGE_RECORDED"
"""Environment variable with the path of a file that gets all names that SGLang asks of kvbridge's classes."""
MODELS = {"deepseek_v2", "llama", "mellum", "qwen3"}
"""SGLang's modules of the models that the tests compute. To import the other 250 takes a process half a minute."""
QUEUES = ("prefill.PrefillBootstrapQueue", "decode.DecodePreallocQueue")
ATTENTION = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"


def register() -> None:
    """Called by SGLang in each process, before it starts anything."""
    import sglang

    others = {file.stem for file in Path(sglang.__file__).parent.glob("srt/models/*.py")} - MODELS
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(sorted(others))

    from sglang.srt.disaggregation.mooncake import conn
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # Otherwise the sender wants pinned memory and CUDA events for its page ids.
    conn.MooncakeKVSender.supports_host_tensor_indices = False
    # DP attention fills batches up, and asks the backend for the length of the requests that are not there.
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _backend: 1
    for queue in QUEUES if os.environ.get(RECORDED) else ():
        HookRegistry.register(f"sglang.srt.disaggregation.{queue}._init_kv_manager", _with_recorders, HookType.AROUND)
    for name in ("extend", "decode"):
        HookRegistry.register(f"{ATTENTION}._run_sdpa_forward_{name}", _in_window_pool, HookType.AROUND)


def _in_window_pool(original: Callable[..., Any], backend: Any, *given: Any, **named: Any) -> Any:
    """Read windows where SGLang has written them: it looks for them under the indices of the full pool."""
    queries, output, keys, values, table, *more = given
    if backend.use_sliding_window_kv_pool and named.get("sliding_window_size") is not None:
        table = backend.token_to_kv_pool.translate_loc_from_full_to_swa(table)
    return original(backend, queries, output, keys, values, table, *more, **named)


def _with_recorders(original: Callable[..., Any], queue: Any) -> Any:
    """Have all classes of the backend record: SGLang asks for the first one now."""
    from kvbridge.engine.sglang import backend

    for kind in ("manager", "sender", "receiver"):
        backend.CLASSES[kind] = _recorder(kind, backend.CLASSES[kind])
    return original(queue)


def _recorder(kind: str, base: type) -> type:
    known: set[str] = set()

    class Recorder(base):
        def __getattribute__(self, name: str) -> Any:
            asker = sys._getframe(1).f_globals["__name__"]
            if name not in known and not name.startswith("__") and asker.startswith("sglang."):
                known.add(name)
                with Path(os.environ[RECORDED]).open("a") as file:
                    print(f"{kind}.{name}", file=file)
            return super().__getattribute__(name)

    return Recorder
