"""What a demo will run and what it says: edges, sizes of pools, refusals, and one wrong logit that turns the verdict."""

from __future__ import annotations

import io
import json
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from kvbridge.config.timeouts import DaemonTimeouts
from kvbridge.core.errors import ConfigError, InvalidInputError
from kvbridge.demo.cluster import cluster_spec, prefill_only_tokens
from kvbridge.demo.options import DemoOptions, RowEncoding
from kvbridge.demo.prompts import LENGTHS, SPARSE_LENGTHS, SYSTEM_TOKENS, single_prompts
from kvbridge.demo.report import compare, concluded, print_report

PAGE = 256


def options(**more) -> DemoOptions:
    return DemoOptions(**more)


def spec(made: DemoOptions):
    return cluster_spec(made, "demo", Path("model.json"))


# ---------------------------------------------------------------------------------------------- requests


def test_single_prompts_lie_at_every_edge_and_differ_where_their_lengths_come_again():
    requests = single_prompts(20, sparse=False, most_tokens=1 << 20)
    assert {request.tokens % PAGE for request in requests} >= {0, 1, 2, 3, 4, 127, 128, 129, 255}
    assert all(request.tokens == len(request.new) for request in requests)
    assert requests[16].tokens == requests[0].tokens
    assert requests[16].new != requests[0].new
    assert {tokens % 4 for tokens in SPARSE_LENGTHS} == {0, 1, 2, 3}
    assert {each.tokens for each in single_prompts(50, sparse=False, most_tokens=4)} == {1, 2, 3, 4} & set(LENGTHS)
    with pytest.raises(InvalidInputError, match="need prompts of up to 4099 tokens, the model takes 4098"):
        single_prompts(1, sparse=True, most_tokens=4098)


def test_turns_continue_their_conversation_end_at_every_edge_and_share_a_system_prompt():
    made = options(turns=10, prompts=4, steps=20)
    requests = made.requests
    assert [request.number for request in requests] == list(range(1, 41))
    for request in requests:
        former = requests[request.previous - 1] if request.previous else None
        assert request.tokens == (former.tokens + 20 if former else 0) + len(request.new)
        assert not former or (former.conversation, former.turn) == (request.conversation, request.turn - 1)
    assert {request.tokens % PAGE for request in requests} >= {0, 1, 2, 3, 4, 127, 128, 129, 255}
    assert any((request.tokens + 20) % PAGE == 0 for request in requests), "some answers end on a page"
    begun = [request.new[:SYSTEM_TOKENS] for request in requests[:4]]
    assert begun[0] == begun[2]
    assert len({text[:PAGE] for text in begun}) == 3
    assert SYSTEM_TOKENS % PAGE, "the known prefix ends inside a page of those who share it"


# ---------------------------------------------------------------------------------------------- daemons


def test_pools_hold_what_is_there_at_once_and_no_daemon_gives_up_a_room():
    made = options(turns=5, keep_answers=True)
    nodes = spec(made)
    last = {request.conversation: request.tokens for request in made.requests}
    for node in (nodes.prefill, nodes.decode):
        assert node.pools["device"]["full"] > sum(tokens // PAGE for tokens in last.values()), "they are to stay"
        assert node.more["tier"]["model_name"] == made.model_name
        for limit in ("begin_s", "offer_s", "room_s", "claim_s"):
            assert node.more["timeouts"][limit] >= 3600
            assert limit in DaemonTimeouts.model_fields
    assert nodes.decode.more["tier"]["generated"]
    assert nodes.prefill.pools["device"]["swa"] > len(made.requests), "checkpoints"
    assert "tier" not in spec(options()).prefill.more


@pytest.mark.parametrize("sparse", [False, True])
def test_with_a_host_tier_the_devices_have_room_for_one_request_and_the_host_for_all(sparse):
    made = options(turns=3, host_tier=True, sparse=sparse)
    nodes, lengths = spec(made), [request.tokens for request in made.requests]
    all_pages = sum(-(-tokens // PAGE) for tokens in lengths)
    for node, never_free in ((nodes.prefill, prefill_only_tokens(made) // PAGE), (nodes.decode, 0)):
        device, host = node.pools["device"]["full"] - never_free, node.more["tier"]["host"]
        assert max(lengths) // PAGE < device < all_pages / 2
        assert host["pages"] >= all_pages
        assert bool(host["checkpoint_pages"]) == (node is nodes.prefill), "windows and states are kept there alone"
    assert nodes.decode.pools["host"]["pages"] >= all_pages, "what is on the host has its C4 rows in the host pool"


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dtype": "bfloat16"}, "the model computes in bfloat16"),
        ({"max_position_embeddings": 4096}, "up to 4099 tokens"),
        ({"layer_types": ["heavily_compressed_attention"] * 7}, "no compressed_sparse_attention layer"),
        ({"vocab_size": 100}, "vocab_size must be at least 256"),
        ({"model_type": "llama"}, "the demo runs model_type 'deepseek_v4', got 'llama'"),
    ],
)
def test_a_model_that_cannot_be_run_is_refused(tmp_path, changed, said):
    facts = json.loads(resources.files("kvbridge").joinpath("engine/adapters/tiny_deepseek_v4.json").read_text())
    file = tmp_path / "config.json"
    file.write_text(json.dumps(facts | changed))
    with pytest.raises(InvalidInputError, match=said):
        _ = options(sparse=True, hf_config=file).hot_buffer
    with pytest.raises(ConfigError, match="--hf-config"):
        _ = options(hf_config=tmp_path / "nothing.json").facts


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"turns": 2, "encoding": RowEncoding.FP8_V4}, "--turns with fp8_v4 rows"),
        ({"keep_answers": True}, "--keep-answers is about later turns"),
        ({"host_tier": True}, "--host-tier is about later turns"),
        ({"prefill_pp": 8}, "--prefill-pp 8: tiny_deepseek_v4 has only 7 layers"),
    ],
)
def test_what_contradicts_itself_is_refused(given, said):
    with pytest.raises(InvalidInputError, match=said):
        _ = options(**given).requests


# ---------------------------------------------------------------------------------------------- the report


@pytest.mark.parametrize("position", [0, 5, 16])
def test_the_last_bit_of_one_logit_is_enough_and_not_a_number_is_never_equal(position):
    logits = np.random.default_rng(7).normal(size=(17, 256)).astype(np.float32)
    assert compare(3, logits, logits.copy()) == {"positions": 17, "first_difference": None, "largest_difference": 0.0}
    tampered = logits.copy()
    tampered[position:].view(np.int32)[0, 200] ^= 1
    found = compare(3, tampered, logits)
    assert found["first_difference"] == position
    assert found["largest_difference"] > 0
    logits[position, 1] = np.nan
    assert compare(1, logits, logits.copy())["first_difference"] == position
    for other in (logits[1:], logits.astype(float), logits[:0]):
        with pytest.raises(InvalidInputError, match="request 9"):
            compare(9, logits, other)


def request(number: int = 1, first_difference: int | None = None, **more) -> dict:
    names = ("computed_tokens", "computed_host_tokens", "prefix_tokens", "prefix_host_tokens")
    return {
        "number": number,
        "conversation": 1,
        "turn": 2,
        "prompt_tokens": 600,
        **dict.fromkeys(names, 256),
        "arrived_bytes": {"swa_kv": 4096},
        "after_prefill_s": 0.1,
        "source_pages": {"full": [1]},
        "destination_pages": {"full": [2]},
        "comparison": {"positions": 5, "first_difference": first_difference, "largest_difference": 0.25},
        **more,
    }


def report(*requests: dict, **more) -> dict:
    words = {
        "reference": "the model alone",
        "transport": "local",
        "device": "cpu",
        "encoding": "native",
        "model": "tiny",
    }
    counts = {"most_in_flight": 1, "turns": 2, "host_tier": True, "hot_rows": 0, "pages_left": 0}
    return concluded(
        words | counts | {"prefill_stages": [[0], [1]], "seconds": {"start": 1.0}, "requests": requests} | more
    )


def test_the_verdict_counts_and_names_the_first():
    assert report(request(), request(2))["verdict"] == "EQUAL: 2 of 2 requests gave the very logits of the model alone"
    assert report(request(), request(3, 1))["verdict"] == (
        "DIFFERENT: 1 of 2 requests gave other logits than the model alone "
        "(request 3: first at decode step 1, logits by up to 0.25)"
    )
    assert "first at the prompt's own logits" in report(request(3, 0))["verdict"]
    assert report()["verdict"].startswith("DIFFERENT")
    assert not report()["good"]


@pytest.mark.parametrize(
    "lacking", ["computed_tokens", "computed_host_tokens", "prefix_tokens", "prefix_host_tokens", ""]
)
def test_a_run_is_good_when_it_has_shown_what_it_is_there_to_show(lacking):
    lacks = request(**({lacking: 0} if lacking else {}))
    assert report(lacks)["good"] is not bool(lacking)
    assert report(lacks, turns=0, host_tier=False)["good"]
    assert not report(lacks, turns=0, host_tier=False, pages_left=1)["good"]
    assert not report(request(first_difference=1))["good"]


def test_a_person_is_told_of_both_sides():
    text = io.StringIO()
    figures = {"selected": 200, "in_hot_slots": 100, "loaded": 50, "rows": 512}
    print_report(
        report(request(sparse=figures, share_of_rounding=0.01), hot_rows=64, pages_left=2),
        Console(file=text, width=150),
    )
    said = " ".join(text.getvalue().split())
    for part in (
        "1: 600 tokens, turn 2 of conversation 1, 256 held by prefill, 256 by decode, 4.1 kB sent",
        "1 of 1 lay in other pages",
        "From host memory came 256 tokens of prefixes on prefill and 256 on decode.",
        "64 hot rows of up to 512 in each C4 layer; of 200 selected rows 75.0% were on the device, 50 came from host memory",
        "2 pages were not given back in the end",
    ):
        assert part in said
    assert said.endswith("EQUAL: 1 of 1 requests gave the very logits of the model alone")
