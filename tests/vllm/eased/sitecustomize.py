"""Makes NixlConnector bearable on a small host. Each Python process with this directory in its PYTHONPATH reads it.

NIXL's progress thread looks without a pause, and vLLM pins both servers' threads to one core. This module ends both.
"""

import importlib
import os
import sys

PAUSE_US = 100
_import_module, _set_affinity = importlib.import_module, os.sched_setaffinity


def _eased_import(name: str, package: str | None = None) -> object:
    module = _import_module(name, package)
    for known in ("nixl_cu12", "nixl_cu13"):
        bindings = sys.modules.get(f"{known}._bindings")
        if bindings is not None and not hasattr(bindings, "_kvbridge_eased"):
            bindings._kvbridge_eased = True
            bindings.nixlAgent = _with_pauses(bindings.nixlAgent)
    return module


def _with_pauses(make_agent: object) -> object:
    def make(name: str, config: object) -> object:
        config.pthrDelay = PAUSE_US
        print(f"eased: NIXL's progress thread of {name} pauses for {PAUSE_US} us", file=sys.stderr, flush=True)
        return make_agent(name, config)

    return make


def _unpinned(pid: int, cores: object) -> None:
    if sys._getframe(1).f_globals.get("__name__", "").endswith(".nixl.base_worker"):
        print("eased: not pinned", file=sys.stderr, flush=True)
        return
    _set_affinity(pid, cores)


importlib.import_module = _eased_import
os.sched_setaffinity = _unpinned
