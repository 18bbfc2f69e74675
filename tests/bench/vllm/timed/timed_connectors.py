"""vLLM's NixlConnector and kvbridge's, which write how long each load took. Runs in vLLM's environment, in the servers.

A load lasts from the allocation of decode's blocks until the worker's report that they are filled. Both come to the scheduler's
process. Lines go to the file that `LOAD_TIMES` names, with a number for each process behind the name: a JSON list of the time when
a load began (monotonic clock, which all processes of a host share) and its seconds.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector as Nixl

from kvbridge.engine.adapters.vllm.connector import KvbridgeConnector as Kvbridge

_allocated_s: dict[str, float] = {}
"""By request."""


def _timed(connector: type[Any]) -> type[Any]:
    """Return the class with a clock around its loads."""

    class Timed(connector):
        def update_state_after_alloc(self, request: Any, blocks: Any, external_tokens: int) -> None:
            begun_s = time.monotonic()
            super().update_state_after_alloc(request, blocks, external_tokens)
            if external_tokens:
                _allocated_s[request.request_id] = begun_s

        def update_connector_output(self, results: Any) -> None:
            super().update_connector_output(results)
            now_s = time.monotonic()
            begun = [_allocated_s.pop(each) for each in results.finished_recving or () if each in _allocated_s]
            if begun:
                with Path(f"{os.environ['LOAD_TIMES']}.{os.getpid()}").open("a") as file:
                    file.writelines(json.dumps([at_s, now_s - at_s]) + "\n" for at_s in begun)

    Timed.__name__ = Timed.__qualname__ = connector.__name__
    return Timed


NixlConnector, KvbridgeConnector = _timed(Nixl), _timed(Kvbridge)
