"""The plan and the words of a demo: edges, sizes of pools, refusals, and one wrong logit that turns the verdict."""

import json
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from kvbridge.config.limits import DaemonTimeouts
from kvbridge.core.errors import ConfigError, InvalidInputError
from kvbridge.demo.plan import LENGTHS, SPARSE_LENGTHS, SYSTEM_TOKENS, DemoOptions, RowEncoding, make_cluster, make_plan
from kvbridge.demo.run import compare, concluded, described

PAGE = 256


def plan(**more):
    return make_plan(DemoOptions(**more))


def test_single_prompts_lie_at_every_edge_and_differ_where_their_lengths_come_again():
    requests = plan(prompts=20).requests
    assert {request.tokens % PAGE for request in requests} >= {0, 1, 2, 3, 4, 127, 128, 129, 255}
    assert all(request.tokens == len(request.new) for request in requests)
    assert requests[16].tokens == requests[0].tokens
    assert requests[16].new != requests[0].new
    assert {tokens % 4 for tokens in SPARSE_LENGTHS} == {0, 1, 2, 3}
    assert [len(batch) for batch in plan(prompts=6).batches] == [4, 2]
    assert set(LENGTHS) >= {1, 2, 3, 4}


def test_turns_continue_their_conversation_end_at_every_edge_and_share_a_system_prompt():
    made = plan(turns=10, prompts=4, steps=20)
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
    assert all(len({request.turn for request in batch}) == 1 for batch in made.batches)


def test_pools_hold_what_is_there_at_once_and_no_daemon_gives_up_a_room():
    made = plan(turns=5)
    nodes = make_cluster(made, Path("demo"))
    last = {request.conversation: request.tokens for request in made.requests}
    for node in (nodes.prefill.config, nodes.decode.config):
        assert node["pools"]["device"]["full"] > sum(tokens // PAGE for tokens in last.values()), "they are to stay"
        assert node["tier"]["model_name"] == made.model
        for limit in ("begin_s", "offer_s", "room_s", "claim_s"):
            assert node["timeouts"][limit] >= 3600
            assert limit in DaemonTimeouts.model_fields
    assert nodes.prefill.config["pools"]["device"]["swa"] > len(made.requests), "checkpoints"
    assert "tier" not in make_cluster(plan(), Path("demo")).prefill.config


@pytest.mark.parametrize(
    ("changed", "said"),
    [
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
        plan(sparse=True, hf_config=file)
    with pytest.raises(ConfigError, match="--hf-config"):
        plan(hf_config=tmp_path / "nothing.json")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"turns": 2, "encoding": RowEncoding.FP8_V4}, "--turns with fp8_v4 rows"),
        ({"prefill_pp": 8}, "--prefill-pp 8: tiny_deepseek_v4 has only 7 layers"),
    ],
)
def test_what_contradicts_itself_is_refused(given, said):
    with pytest.raises(InvalidInputError, match=said):
        plan(**given)


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
    return {
        "number": number,
        "conversation": 1,
        "turn": 2,
        "prompt_tokens": 600,
        "computed_tokens": 256,
        "prefix_tokens": 256,
        "arrived_bytes": {"swa_kv": 4096},
        "source_pages": {"full": [1]},
        "destination_pages": {"full": [2]},
        "comparison": {"positions": 5, "first_difference": first_difference, "largest_difference": 0.25},
        **more,
    }


def report(*requests: dict, pages_left: int = 0, **options) -> dict:
    return concluded(plan(**({"turns": 2} | options)), list(requests), pages_left)


def test_the_verdict_counts_and_names_the_first():
    assert report(request(), request(2))["verdict"] == "EQUAL: 2 of 2 requests gave the very logits of the model alone"
    assert report(request(), request(3, 1))["verdict"] == (
        "DIFFERENT: 1 of 2 requests gave other logits than the model alone "
        "(request 3: first at decode step 1, logits by up to 0.25)"
    )
    assert "first at the prompt's own logits" in report(request(3, 0))["verdict"]
    assert report()["verdict"].startswith("DIFFERENT")
    assert not report()["good"]
    sparse = report(request(), turns=0, sparse=True, encoding=RowEncoding.FP8_V4)
    assert sparse["verdict"].endswith("the model alone with fp8_v4 rows, attending to the selected ones")


@pytest.mark.parametrize("lacking", ["computed_tokens", "prefix_tokens", ""])
def test_a_run_is_good_when_it_has_shown_what_it_is_there_to_show(lacking):
    lacks = request(**({lacking: 0} if lacking else {}))
    assert report(lacks)["good"] is not bool(lacking)
    assert ("Nothing was reused" in described(report(lacks))) is bool(lacking)
    assert report(lacks, turns=0)["good"]
    assert not report(lacks, turns=0, pages_left=1)["good"]
    assert not report(request(first_difference=1))["good"]


def test_a_person_is_told_of_both_sides():
    said = described(report(request(sparse={"in_hot_slots": 100, "loaded": 50}), sparse=True, pages_left=2))
    for part in (
        "1:   600 tokens, turn 2 of conversation 1, 256 held by prefill, 256 by decode, 4,096 bytes sent, equal",
        "1 of 1 lay in other pages",
        "64 hot rows in each C4 layer; 100 selected rows were in hot slots, 50 came from host memory",
        "2 pages were not given back in the end",
    ):
        assert part in said
    assert said.endswith("gave the very logits of the model alone, attending to the selected ones")
