"""Who may write a room together: the nodes of one prefill instance, all of them.

Three real daemons, and no bootstrap in between: whoever asks decode names the prefill nodes. Two of them hold ranks of different
instances, chosen so that the rows that both report add up to the rows that decode needs: a quarter is sent twice, another never.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress

import pytest

from kvbridge.core.errors import ConflictError, RoomFailedError
from kvbridge.core.plan.operations import Section
from kvbridge.engine.decode import DecodeEngine
from kvbridge.engine.prefill import PrefillEngine
from tests.helpers import synthetic
from tests.helpers.cluster import Cluster, DaemonProcess, cluster, daemon_config
from tests.helpers.live_rooms import all_free, ends, http

MODEL = {"model_type": "deepseek_v3", "num_hidden_layers": 4, "kv_lora_rank": 448, "qk_rope_head_dim": 64}
POOLS = {"device": {"full": 32}}
TOKENS = 1_024
"""16 pages: as many for each of four replicas."""


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """`prefill` is rank 0 of 2, the other prefill node ranks 2 and 3 of 4."""
    file = tmp_path_factory.mktemp("model") / "config.json"
    file.write_text(json.dumps(MODEL))
    model = {"hf_config": str(file), "encoding": "bf16", "tokens_per_page": 64}
    half = {"parallelism": {"tp_size": 2, "ranks": [{"pp": 0, "tp": 0}]}}
    with cluster(model, prefill=half, decode={"pools": POOLS | {"host": {"components": []}}}, wait=False) as running:
        folder = running.folder / "q"
        other = DaemonProcess("prefill", "the other prefill daemon", folder)
        other.config = daemon_config(
            model, instance="prefill-1", runtime_dir=other.runtime_dir, transport="local", pools=POOLS
        )
        other.config["parallelism"] = {"tp_size": 4, "ranks": [{"pp": 0, "tp": 2}, {"pp": 0, "tp": 3}]}
        running.others.append(other)
        other.start()
        for daemon in running.all()[1:]:
            daemon.wait_ready()
        yield running


def admitted(three: Cluster, *writers: DaemonProcess) -> int:
    """Admit one room on decode and on the prefill nodes that it names."""
    controls = [writer.endpoint().control for writer in writers]
    body = {"prompt_tokens": TOKENS, "prefill": [control.model_dump() for control in controls if control]}
    answer = http("POST", three.decode, "/v1/requests", json=body)
    assert answer.status_code == 201, answer.text
    room = int(answer.json()["room"])
    for writer in writers:
        answer = http("POST", writer, "/v1/requests", json={"prompt_tokens": TOKENS, "room": room})
        assert answer.status_code == 201, answer.text
    return room


def end(room: int, *writers: DaemonProcess) -> None:
    """Give the room up where nobody has told the writers: their end would wait for it."""
    for writer in writers:
        http("DELETE", writer, f"/v1/requests/{room}")


def write(writer: DaemonProcess, room: int) -> None:
    with PrefillEngine.attach(writer.runtime_dir) as engine:
        tables = engine.begin(room, prompt_tokens=TOKENS).tables
        section = Section(prompt_tokens=TOKENS, start_token=0, stop_token=TOKENS)
        for views in engine.views.values():
            synthetic.fill(views, room=room, tables=tables, section=section)
        engine.publish(room, TOKENS)
        engine.finish(room)


def test_ranks_of_two_instances_do_not_make_up_one(three: Cluster) -> None:
    """Their rows add up; the room is refused all the same, before a byte has moved, and the error says who is of what."""
    [other] = three.others
    with DecodeEngine.attach(three.decode.runtime_dir) as reader:
        room = admitted(three, three.prefill, other)
        for writer in (three.prefill, other):
            with suppress(ConflictError):  # it may have heard from decode already that the room is over
                write(writer, room)
        with pytest.raises(RoomFailedError) as caught:
            reader.wait_claim(room, 20.0)
    end(room, three.prefill, other)
    for words in ("prefill-0/node-0", "pp0.tp0", "prefill-1/node-0", "pp0.tp2", "pp0.tp3", "tp_size 2", "tp_size 4"):
        assert words in str(caught.value)
    all_free(three.decode)


def test_a_part_of_an_instance_is_not_enough(three: Cluster) -> None:
    room = admitted(three, three.prefill)
    assert "pp0.tp1" in ends(three.decode, room, "failed", "invalid_input")
    end(room, three.prefill)
    all_free(three.decode)
