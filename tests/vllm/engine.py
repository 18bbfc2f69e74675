"""One vLLM engine in one process, asked by lines: `python tests/vllm/engine.py '{"model": ...}'`. In vLLM's environment.

Each line that comes in and goes out is a JSON object. An engine like this starts in seconds where a server takes minutes.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from typing import Any

IDLE_S = 0.002

lines = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # whatever else is printed goes to the log
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}

from vllm import LLM, SamplingParams  # noqa: E402 - the environment comes first
from vllm.config import KVTransferConfig  # noqa: E402


def main() -> None:
    settings = json.loads(sys.argv[1])
    if transfer := settings.pop("transfer", None):
        settings["kv_transfer_config"] = KVTransferConfig(**transfer)
    engine = LLM(enforce_eager=True, skip_tokenizer_init=True, disable_log_stats=True, **settings).llm_engine
    core = engine.engine_core.engine_core
    config = core.scheduler.kv_cache_config
    tell({"groups": [type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups], "blocks": [group.kv_cache_spec.block_size for group in config.kv_cache_groups]})
    asked: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threading.Thread(target=read, args=(asked,), daemon=True).start()
    while True:
        worked = core.scheduler.has_requests()
        while not asked.empty() or not worked:
            try:
                request = asked.get(timeout=0.2 if not worked else 0)
            except queue.Empty:
                break
            if request is None:
                core.shutdown()
                return
            answer(engine, core, request)
            worked = True
        for output in engine.step():
            if output.finished:
                told(output)
        if not core.scheduler.running:
            time.sleep(IDLE_S)


def read(asked: queue.Queue[dict[str, Any] | None]) -> None:
    for line in sys.stdin:
        asked.put(json.loads(line))
    asked.put(None)


def answer(engine: Any, core: Any, request: dict[str, Any]) -> None:
    name = request["id"]
    pool, scheduler = core.scheduler.kv_cache_manager.block_pool, core.scheduler
    if "look" in request:
        preempted = sum(each.num_preemptions for each in scheduler.requests.values())
        used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        tell({"id": name, "used": used, "requests": len(scheduler.requests), "preempted": preempted})
    elif "forget" in request:
        tell({"id": name, "forgotten": scheduler.reset_prefix_cache()})
    elif "abort" in request:
        engine.abort_request([request["abort"]])
        tell({"id": name})
        tell({"id": request["abort"], "status": 200, "reason": "abort"})
    else:
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=request["max_tokens"],
            ignore_eos=True,
            logprobs=2,
            detokenize=False,
            extra_args={"kv_transfer_params": request["transfer"]} if request.get("transfer") else None,
            **request.get("further", {}),
        )
        try:
            engine.add_request(name, {"prompt_token_ids": request["prompt"]}, sampling)
        except ValueError as error:
            tell({"id": name, "status": 400, "reason": str(error)})


def told(output: Any) -> None:
    [choice] = output.outputs
    likelihoods = [sorted((one.logprob for one in each.values()), reverse=True) for each in choice.logprobs or []]
    of_tokens = [each[token].logprob for token, each in zip(choice.token_ids, choice.logprobs or [], strict=True)]
    tell(
        {
            "id": output.request_id,
            "status": 200,
            "tokens": list(choice.token_ids),
            "logprobs": of_tokens,
            "seconds_best": [best[0] - best[1] for best in likelihoods],
            "reason": choice.finish_reason,
            "transfer": output.kv_transfer_params,
            "cached": output.num_cached_tokens,
        }
    )


def tell(what: dict[str, Any]) -> None:
    lines.write(json.dumps(what) + "\n")


if __name__ == "__main__":
    main()
