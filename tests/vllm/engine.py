"""One vLLM engine in one process, asked over HTTP: `python tests/vllm/engine.py PORT '{"model": ...}'`. In vLLM's environment.

Such an engine starts in seconds, where vLLM's own server, which is three processes, takes minutes on a loaded machine.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

IDLE_S = 0.002
Call = tuple[str, dict[str, Any], queue.Queue[dict[str, Any]]]


class Engine:
    """The engine, for the main thread; calls come from threads of the HTTP server."""

    def __init__(self, settings: dict[str, Any]) -> None:
        if transfer := settings.pop("transfer", None):
            settings["kv_transfer_config"] = KVTransferConfig(**transfer)
        self._llm = LLM(skip_tokenizer_init=True, disable_log_stats=True, **settings).llm_engine
        self._core = self._llm.engine_core.engine_core
        self.calls: queue.Queue[Call] = queue.Queue()
        self._answers: dict[str, queue.Queue[dict[str, Any]]] = {}
        self._stepwise = False
        # vLLM asks this of each step of a prompt, when it knows what of the prompt is cached.
        self._core.scheduler._reserve_prefill_lookahead = self._end_chunk_before_last_token
        self._preempted = self._drafted = 0
        self.ends = threading.Event()

    def run(self) -> None:
        """Work until `ends`, and end the engine's node then."""
        while not self.ends.is_set():
            works = self._core.scheduler.has_requests()
            try:
                self._take(*self.calls.get(timeout=0 if works else 0.1))
            except queue.Empty:
                self._step(works)
        self._core.shutdown()

    def _step(self, works: bool) -> None:
        if not works:
            return
        before = {one.request_id: one.num_preemptions for one in self._core.scheduler.running}
        for output in self._llm.step():
            if output.finished and (answers := self._answers.pop(output.request_id, None)):
                answers.put(_told(output))
        for one in self._core.scheduler.requests.values():
            self._drafted += len(one.spec_token_ids)
            self._preempted += one.num_preemptions - before.get(one.request_id, one.num_preemptions)
        if not self._core.scheduler.running:
            time.sleep(IDLE_S)

    def _end_chunk_before_last_token(self, request: Any, computed: int, tokens: int) -> int:
        """Return for how many tokens a step continues a prompt: in step mode the last one has its own, as in a pair."""
        last = request.num_prompt_tokens - 1
        return last - computed if self._stepwise and computed < last < computed + tokens else tokens

    def _take(self, path: str, body: dict[str, Any], answers: queue.Queue[dict[str, Any]]) -> None:
        scheduler = self._core.scheduler
        if path == "/used":
            pool, groups = scheduler.kv_cache_manager.block_pool, scheduler.kv_cache_config.kv_cache_groups
            specs = [f"{type(group.kv_cache_spec).__name__} {group.kv_cache_spec.block_size}" for group in groups]
            used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
            found = {"used": used, "requests": len(scheduler.requests), "groups": specs}
            answers.put(found | {"preempted": self._preempted, "drafted": self._drafted})
        elif path == "/forget":
            answers.put({"forgotten": scheduler.reset_prefix_cache()})
        elif path == "/abort":
            self._answers.pop(body["id"], None)
            self._llm.abort_request([body["id"]])
            answers.put({})
        else:
            self._answers[body["id"]] = answers
            self._stepwise = body["stepwise"]
            transfer = body.get("transfer")
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=body["max_tokens"],
                ignore_eos=True,
                logprobs=2,
                detokenize=False,
                extra_args={"kv_transfer_params": transfer} if transfer else None,
                **body.get("further", {}),
            )
            self._llm.add_request(body["id"], {"prompt_token_ids": body["prompt"]}, sampling)


def _told(output: Any) -> dict[str, Any]:
    [choice] = output.outputs
    each = choice.logprobs or []
    return {
        "tokens": list(choice.token_ids),
        "logprobs": [top[token].logprob for token, top in zip(choice.token_ids, each, strict=False)],
        "top": [[one.logprob for one in top.values()] for top in each],
        "reason": choice.finish_reason,
        "transfer": output.kv_transfer_params,
        "cached": output.num_cached_tokens,
    }


class Handler(BaseHTTPRequestHandler):
    """One call of the engine."""

    engine: Engine
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or the body of an answer waits 40 ms for the client to confirm the headers

    def do_GET(self) -> None:
        self._call({})

    def do_POST(self) -> None:
        self._call(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))

    def _call(self, body: dict[str, Any]) -> None:
        answers: queue.Queue[dict[str, Any]] = queue.Queue()
        if self.path == "/health":
            answers.put({})
        else:
            self.engine.calls.put((self.path, body, answers))
        try:
            answer = answers.get(timeout=body.get("leave_after_s"))
        except queue.Empty:
            self.engine.calls.put(("/abort", body, answers))
            answer = answers.get()
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Say nothing of each call."""


def main() -> None:
    port, settings = int(sys.argv[1]), json.loads(sys.argv[2])
    engine = Handler.engine = Engine(settings)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: engine.ends.set())
    ThreadingHTTPServer.request_queue_size = 1024
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    engine.run()
    os._exit(0)  # threads of libraries hold up the interpreter's own end


if __name__ == "__main__":
    main()
