"""One end of SGLang's own transfer, prefill or decode: its manager, sender and receiver over Mooncake, without a model.

Its pools have the sizes and the order that SGLang has for DeepSeek-V4-Flash. It runs in an environment that has SGLang and not
kvbridge (`make bench-peers`), so it imports nothing of this repository, and nothing of SGLang is copied here.

Started as `sglang_end.py ROLE BOOTSTRAP_PORT PAGES`. Every line of standard input is a command as JSON, every line of standard
output its answer. SGLang prints to standard error.

Times are of the system's monotonic clock, which all processes share. SGLang's scheduler asks `poll` once in each of its turns, as
fast as it can; here a turn sleeps `POLL_S`, which leaves the cores to the threads that send.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from unittest.mock import MagicMock

ROLE, PORT, PAGES = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.environ |= {
    "MOONCAKE_PROTOCOL": "tcp",
    "SGLANG_HOST_IP": "127.0.0.1",
    "HOST_IP": "127.0.0.1",
    "MC_LOG_LEVEL": "ERROR",
}
ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

transformers.utils.is_torchvision_available()  # it is not, and is not asked for again
for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional", "torchvision.io"):
    sys.modules[name] = MagicMock()  # imported on the way to the transfer, and never called

from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll, StateType  # noqa: E402
from sglang.srt.disaggregation.mooncake import conn  # noqa: E402
from sglang.srt.disaggregation.utils import DisaggregationMode, MetadataBuffers  # noqa: E402
from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (  # noqa: E402
    init_mooncake_transfer_engine,
)
from sglang.srt.runtime_context import get_context, get_parallel  # noqa: E402

ADDRESS = f"127.0.0.1:{PORT}"
PAGE_TOKENS = 256
KV_BYTES = (37_440,) * 21 + (8_448,) * 21 + (1_728,) * 20
"""Bytes of a page: the C4 layers' rows, their indexers', the C128 layers'."""
WINDOW_BYTES = (149_760,) * 43 + (65_536,) * 21 + (16_384,) * 21
"""Bytes of a page of windows: each layer's rows, the states of the C4 layers, those of their indexers."""
REQUEST_BYTES = (524_288,) * 20
"""Bytes of a request: the states of the C128 layers. Not sent when a prompt ends with a page."""
WINDOWS, REQUESTS = 4, 2
POLL_S = 0.0001
LIMIT_S = 60.0
RANKS = dict.fromkeys(("tp_rank", "pp_rank", "attn_tp_rank", "attn_cp_rank", "attn_dp_rank", "attn_dcp_rank"), 0)


class Pool:
    def __init__(self, items: int, item_bytes: tuple[int, ...], seed: int) -> None:
        self.item_bytes = list(item_bytes)
        self.buffers = [np.zeros((items, each), dtype=np.uint8) for each in item_bytes]
        for number, buffer in enumerate(self.buffers):
            if ROLE == "prefill":
                buffer[:] = np.frombuffer(np.random.default_rng((seed, number)).bytes(buffer.nbytes), np.uint8).reshape(
                    buffer.shape
                )
            else:
                buffer.fill(0xFF)  # so that the memory exists

    @property
    def pointers(self) -> list[int]:
        return [each.ctypes.data for each in self.buffers]

    @property
    def lengths(self) -> list[int]:
        return [each.nbytes for each in self.buffers]

    def digests(self, items: list[int]) -> list[int]:
        return [zlib.crc32(np.ascontiguousarray(each[items])) for each in self.buffers]

    def wipe(self, items: list[int]) -> None:
        for each in self.buffers:
            each[items] = 0


def arguments(kv: Pool, windows: Pool, requests: Pool, metadata: MetadataBuffers) -> KVArgs:
    found = KVArgs()
    found.engine_rank = found.gpu_id = found.pp_rank = found.system_dp_rank = found.prefill_start_layer = 0
    found.prefill_end_layer, found.page_size = 43, PAGE_TOKENS
    found.kv_head_num = found.total_kv_head_num = 1
    found.ib_device, found.kv_cache_dtype_str = "", "fp8_e4m3"
    found.mla_compression_ratios = [0, 0, *(4, 128) * 20, 4]
    found.is_hybrid_mla_backend = False
    found.kv_data_ptrs, found.kv_data_lens, found.kv_item_lens = kv.pointers, kv.lengths, kv.item_bytes
    found.kv_layer_ids = []
    found.aux_data_ptrs, found.aux_data_lens, found.aux_item_lens = metadata.get_buf_infos()
    found.state_types = [StateType.SWA, StateType.DSV4_REQUEST_STATE]
    found.state_data_ptrs = [windows.pointers, requests.pointers]
    found.state_data_lens = [windows.lengths, requests.lengths]
    found.state_item_lens = [windows.item_bytes, requests.item_bytes]
    found.state_layer_ids = found.state_dim_per_tensor = found.state_slice_outer_counts = [[], []]
    found.state_conv_shard_groups = [[], []]
    found.swa_kv_cache_layout = None
    return found


class End:
    def __init__(self) -> None:
        server_args = (
            get_context()
            .override_server_args(
                host="127.0.0.1",
                disaggregation_mode=ROLE,
                disaggregation_bootstrap_port=PORT,
                disaggregation_transfer_backend="mooncake",
                page_size=PAGE_TOKENS,
            )
            .install()
        )
        get_parallel().override_permanently(**RANKS, pp_group=None)
        init_mooncake_transfer_engine("127.0.0.1")
        self.kv, self.windows = Pool(PAGES, KV_BYTES, 1), Pool(WINDOWS, WINDOW_BYTES, 2)
        self._requests = Pool(REQUESTS, REQUEST_BYTES, 3)
        self.metadata = MetadataBuffers(8, 16, torch.float32, 16)
        given = arguments(self.kv, self.windows, self._requests, self.metadata)
        self.aux_bytes = sum(given.aux_item_lens)
        self.manager = conn.MooncakeKVManager(given, DisaggregationMode(ROLE), server_args, is_mla_backend=True)

    def digests(self, command: dict) -> dict:
        return {"crc32": self.kv.digests(command["pages"]) + self.windows.digests([command["window"]])}

    def wipe(self, command: dict) -> dict:
        self.kv.wipe(command["pages"])
        self.windows.wipe([command["window"]])
        return {}

    def facts(self, _: dict) -> dict:
        return {"page_bytes": sum(KV_BYTES), "window_bytes": sum(WINDOW_BYTES), "aux_bytes": self.aux_bytes}


def until(endpoint: conn.MooncakeKVSender | conn.MooncakeKVReceiver, wanted: int) -> float:
    """Ask as its scheduler does; returns when it was there."""
    deadline_s = time.monotonic() + LIMIT_S
    while (found := endpoint.poll()) < wanted:
        if found == KVPoll.Failed:
            endpoint.failure_exception()
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{ROLE}: {found} and not {wanted} within {LIMIT_S} s")
        time.sleep(POLL_S)
    return time.monotonic()


class Prefill(End):
    def __init__(self) -> None:
        self._server = conn.MooncakeKVBootstrapServer("127.0.0.1", PORT)
        super().__init__()

    def request(self, command: dict) -> dict:
        """Send the chunks of a prompt; `held`: when the other end's pages are known, say so and wait for the word."""
        chunks = [np.array(each, dtype=np.int32) for each in command["chunks"]]
        self.metadata.bootstrap_room[0] = command["room"]
        sender = conn.MooncakeKVSender(self.manager, ADDRESS, command["room"])
        say({"ready": True})
        until(sender, KVPoll.WaitingForInput)
        sender.init(sum(map(len, chunks)), 0)
        if command["held"]:
            say({"waiting": True})
            sys.stdin.readline()
        begun_s = time.monotonic()
        states = [[command["window"]], []]
        for number, chunk in enumerate(chunks, 1):
            sender.send(chunk, states if number == len(chunks) else None)
        done_s = until(sender, KVPoll.Success)
        sender.clear()
        return {"begun_s": begun_s, "done_s": done_s}


class Decode(End):
    def connect(self, _: dict) -> dict:
        deadline_s = time.monotonic() + LIMIT_S
        while not self.manager.try_ensure_parallel_info(ADDRESS):
            if time.monotonic() > deadline_s:
                raise TimeoutError("the prefill end has not registered")
            time.sleep(0.05)
        return {}

    def request(self, command: dict) -> dict:
        pages = np.array(command["pages"], dtype=np.int32)
        self.metadata.clear_slot(0)
        begun_s = time.monotonic()
        receiver = conn.MooncakeKVReceiver(self.manager, ADDRESS, command["room"])
        receiver.init(0)
        receiver.send_metadata(pages, 0, [[command["window"]], []])
        done_s = until(receiver, KVPoll.Success)
        if int(self.metadata.bootstrap_room[0, 0]) != command["room"]:
            raise RuntimeError(f"the metadata of room {command['room']} did not come")
        receiver.clear()
        return {"begun_s": begun_s, "done_s": done_s}


def say(answer: dict) -> None:
    ANSWERS.write(json.dumps(answer) + "\n")


def main() -> None:
    end = Prefill() if ROLE == "prefill" else Decode()
    say({"started": True})
    for line in sys.stdin:
        command = json.loads(line)
        say(getattr(end, command.pop("do"))(command))
    os._exit(0)  # its threads have no end


main()
