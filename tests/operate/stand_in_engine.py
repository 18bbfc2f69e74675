"""A server in the place of vLLM's or SGLang's: it reads the server's own arguments, runs the node, and answers /health.

`python -m tests.operate.stand_in_engine vllm serve MODEL --kv-transfer-config=... --port=8000 ...`, likewise `sglang`.
"""

import json
import os
import sys
from collections.abc import Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvbridge.core.ids import Rank, Role
from kvbridge.engine.kit.node import NodePlace, NodePlan, open_node
from kvbridge.engine.kit.tensors import instance_cache, rank_cache, rank_regions
from kvbridge.engine.memory import AdoptedWorker
from kvbridge.engine.sglang import SETTINGS_FILE, SGLANG
from kvbridge.engine.sglang.instance import read_settings
from kvbridge.engine.vllm import VLLM
from tests.helpers.vllm_links import TOKENS, caches

PROGRAMS = {"vllm": VLLM, "sglang": SGLANG}


def plan(role: Role, settings: Mapping[str, Any], product: Any = VLLM) -> NodePlan:
    told = rank_cache(caches(range(3), 4, 6), block_tokens=TOKENS, product=product)
    cache = instance_cache({Rank(pp=0, tp=0): told}, name="tiny", kv_heads=4, facts={})
    return NodePlan(
        NodePlace(product, role, "an-engine", settings), cache, tp_size=1, devices={Rank(pp=0, tp=0): "cpu"}
    )


def main(engine: str, *words: str) -> None:
    options = dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--"))
    if engine == "vllm":
        told = json.loads(options["kv-transfer-config"])
        role = {"kv_producer": Role.PREFILL, "kv_consumer": Role.DECODE}[told["kv_role"]]
        settings, info = told["kv_connector_extra_config"], None
        assert os.environ["VLLM_API_KEY"]
    else:
        role, settings = Role(options["disaggregation-mode"]), read_settings(os.environ[SETTINGS_FILE])
        port = int(options["disaggregation-bootstrap-port"])
        info = {"disaggregation_mode": role, "disaggregation_bootstrap_port": port}
        assert "$" not in options["api-key"]
    made = plan(role, settings, PROGRAMS[engine])
    node = open_node(made, timeout_s=120)
    rank, (component,) = Rank(pp=0, tp=0), made.cache.geometry.components
    regions = rank_regions(component, caches(range(3), 4, 6), rank, tp_size=1)
    _worker = AdoptedWorker(node.runtime_dir, rank, regions)
    assert options["host"] == "0.0.0.0"
    # Pods have one loopback interface in the test, so each listens on its own address there.
    ThreadingHTTPServer((os.environ["POD_IP"], int(options["port"])), partial(Handler, info)).serve_forever()


class Handler(BaseHTTPRequestHandler):
    def __init__(self, info: dict[str, Any] | None, *arguments: Any) -> None:
        self.info = info
        super().__init__(*arguments)

    def do_GET(self) -> None:
        is_there = self.path == "/health" or (self.path == "/server_info" and self.info is not None)
        body = json.dumps(self.info).encode()
        self.send_response(200 if is_there else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    main(*sys.argv[1:])
