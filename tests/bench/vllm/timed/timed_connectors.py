"""vLLM's NixlConnector and kvbridge's, with a clock around each hook. Runs in vLLM's environment, in the servers.

The rows go to the file that `HOOK_TIMES` names, a number for each process behind it.

A row is a JSON list: when (monotonic clock, which all processes of a host share), what, seconds, the request's id.

- `step`: all hooks of one step of the engine in one process together, without those that name a request
- the name of a hook that is called for one request
- `load`: from the allocation of decode's blocks until the worker's report that they are filled
"""

from __future__ import annotations

import atexit
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector as Nixl

from kvbridge.engine.vllm.connector import KvbridgeConnector as Kvbridge

STEP_HOOKS = """
build_connector_meta update_connector_output bind_connector_metadata handle_preemptions start_load_kv wait_for_layer_load
save_kv_layer wait_for_save finish_forward get_transfer_results get_block_ids_with_load_errors get_kv_connector_stats
get_kv_connector_kv_cache_events build_connector_worker_meta clear_connector_metadata
"""
REQUEST_HOOKS = """
on_new_request get_num_new_matched_tokens update_state_after_alloc request_finished request_finished_all_groups
"""
STEP_BEGINS = ("build_connector_meta", "bind_connector_metadata")
"""In the scheduler's process, and in a worker's."""
ROWS_KEPT = 500


class Rows:
    def __init__(self) -> None:
        self._path = Path(f"{os.environ['HOOK_TIMES']}.{os.getpid()}")
        self._rows: list[str] = []
        self._depth = 0
        self._step: list[float] = [0.0, 0.0]
        self._allocated_s: dict[str, float] = {}
        atexit.register(self.write)

    def write(self) -> None:
        rows, self._rows = self._rows, []
        if rows:
            with self._path.open("a") as file:
                file.write("\n".join(rows) + "\n")

    def add(self, at_s: float, what: str, seconds: float, request: str = "") -> None:
        self._rows.append(json.dumps([at_s, what, seconds, request]))
        if len(self._rows) >= ROWS_KEPT:
            self.write()

    def around(self, hook: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the hook with a clock; hooks that it calls itself are a part of it."""
        of_request = hook in REQUEST_HOOKS.split()

        def timed(connector: Any, *args: Any, **named: Any) -> Any:
            if self._depth:
                return call(connector, *args, **named)
            self._depth += 1
            begun_s = time.monotonic()
            try:
                result = call(connector, *args, **named)
            finally:
                self._depth -= 1
                seconds = time.monotonic() - begun_s
            if of_request:
                self.add(begun_s, hook, seconds, args[0].request_id)
                self._request(hook, begun_s, args)
            else:
                self._of_step(hook, begun_s, seconds)
                if hook == "update_connector_output":  # in the process that has allocated
                    self._reported(args[0])
            return result

        return timed

    def _of_step(self, hook: str, begun_s: float, seconds: float) -> None:
        if hook in STEP_BEGINS:
            self.add(self._step[0], "step", self._step[1])
            self._step = [begun_s, 0.0]
        self._step[1] += seconds

    def _request(self, hook: str, at_s: float, args: tuple[Any, ...]) -> None:
        if hook == "update_state_after_alloc" and args[2]:
            self._allocated_s[args[0].request_id] = at_s

    def _reported(self, results: Any) -> None:
        now_s = time.monotonic()
        for request in results.finished_recving or ():
            if (allocated_s := self._allocated_s.pop(request, None)) is not None:
                self.add(allocated_s, "load", now_s - allocated_s, request)


_rows = Rows()


class NixlConnector(Nixl):
    def shutdown(self) -> None:
        _rows.write()
        super().shutdown()


class KvbridgeConnector(Kvbridge):
    def shutdown(self) -> None:
        _rows.write()
        super().shutdown()


for _connector in (NixlConnector, KvbridgeConnector):
    for _hook in (STEP_HOOKS + REQUEST_HOOKS).split():
        if hasattr(_connector, _hook):
            setattr(_connector, _hook, _rows.around(_hook, getattr(_connector, _hook)))
