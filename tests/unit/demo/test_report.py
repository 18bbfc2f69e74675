"""One wrong logit is found, named, and turns the verdict; so does reuse that did not happen, and a page that is not free."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.plan.operations import Amount
from kvbridge.demo.messages import Computed, Decoded, Prefilled
from kvbridge.demo.prompts import Request
from kvbridge.demo.report import Comparison, DemoReport, RequestReport, compare, print_report

EQUAL = Comparison(5, None, 0.0)


@pytest.fixture
def logits():
    return np.random.default_rng(7).normal(size=(17, 256)).astype(np.float32)


def test_equal_logits_are_equal(logits):
    assert compare(3, logits, logits.copy()) == Comparison(17, None, 0.0)


@pytest.mark.parametrize("position", [0, 5, 16])
def test_the_last_bit_of_one_logit_is_enough(logits, position):
    tampered = logits.copy()
    tampered[position:].view(np.int32)[0, 200] ^= 1
    found = compare(3, tampered, logits)
    assert found.first_difference == position
    assert found.largest_difference > 0


def test_not_a_number_is_never_equal(logits):
    logits[4, 1] = np.nan
    assert compare(1, logits, logits.copy()).first_difference == 4


@pytest.mark.parametrize(
    "other", [np.zeros((16, 256), np.float32), np.zeros((17, 256)), np.zeros((0, 256), np.float32)]
)
def test_what_cannot_be_compared_is_refused(logits, other):
    with pytest.raises(InvalidInputError, match="request 9"):
        compare(9, logits, other)


def request(
    number: int = 1,
    *,
    comparison=EQUAL,
    prefix=(512, 256),
    computed=(512, 256),
    took_s=0.5,
    **planned,
) -> RequestReport:
    """`prefix` and `computed`: tokens that decode and prefill held, and of them those from host memory."""
    facts = Request(number, 600, (), conversation=1, turn=2, **{"page_keys": True} | planned)
    logits = np.zeros((1, 1), np.float32)
    prefilled = Prefilled(number, {"full": [1]}, *computed, finished_s=0.4, logits=logits)
    amounts = {ComponentKind.SWA_KV: Amount(bytes=4096, operations=3)}
    decoded = Decoded(number, {"full": [2]}, *prefix, amounts, took_s, tokens=(), logits=logits, sparse=None)
    return RequestReport(facts, 0.0, prefilled, decoded, Computed(number, logits), comparison, 100)


def report(*requests: RequestReport, **more) -> DemoReport:
    facts = {
        "reference": "the model alone",
        "transport": "local",
        "device": "cpu",
        "encoding": "native",
        "prefill_stages": ((0,), (1,)),
        "model": "tiny",
        "weights": "",
        "versions": {},
        "most_in_flight": 1,
        "turns": 2,
        "keep_answers": False,
        "host_tier": True,
        "hot_rows": 0,
        "pages_left": 0,
        "seconds": {"start": 1.0},
    }
    return DemoReport(requests=requests, **facts | more)


def test_the_verdict_counts_and_names_the_first():
    line = "EQUAL: 2 of 2 requests gave the very logits of the model alone"
    assert report(request(), request(2)).verdict == line
    wrong = request(3, comparison=Comparison(5, 1, 0.25))
    assert report(request(), wrong).verdict == (
        "DIFFERENT: 1 of 2 requests gave other logits than the model alone "
        "(request 3: first at decode step 1, logits by up to 0.25)"
    )
    assert "first at the prompt's own logits" in report(request(3, comparison=Comparison(5, 0, 0.25))).verdict
    assert report().verdict.startswith("DIFFERENT")
    assert not report().good


@pytest.mark.parametrize(
    ("lacking", "good"),
    [
        ({}, True),
        ({"prefix": (0, 0)}, False),
        ({"computed": (0, 0)}, False),
        ({"prefix": (512, 0)}, False),
        ({"computed": (512, 0)}, False),
        ({"comparison": Comparison(5, 1, 0.25)}, False),
    ],
)
def test_a_run_is_good_when_it_has_shown_what_it_is_there_to_show(lacking, good):
    found = report(request(**lacking))
    assert found.good is good
    assert replace(found, turns=0).good is ("comparison" not in lacking)
    assert not replace(found, pages_left=1).good


def test_a_person_is_told_of_both_sides_and_of_what_a_hit_is_worth():
    text = io.StringIO()
    cold = request(2, by_itself=True, page_keys=False, took_s=1.0)
    print_report(report(request(by_itself=True), cold), Console(file=text, width=150))
    said = " ".join(text.getvalue().split())
    assert "2 of 2 lay in other pages" in said
    assert "turn 2 of conversation 1 without reuse, 512 held by prefill, 512 by decode, 4.1 kB sent" in said
    assert "after 1,000 ms without reuse and after 500 ms with it: 2.0 times as fast" in said
    assert "From host memory came 512 tokens of prefixes on prefill and 512 on decode." in said
    assert said.endswith("EQUAL: 2 of 2 requests gave the very logits of the model alone")


def test_a_report_is_json_without_what_is_large():
    found = report(request())
    printed = json.loads(json.dumps(found.as_dict()))
    assert (printed["verdict"], printed["good"]) == (found.verdict, True)
    (told,) = printed["requests"]
    assert told["arrived_bytes"] == {"swa_kv": 4096}
    assert told["comparison"] == {"positions": 5, "first_difference": None, "largest_difference": 0.0}
    assert (told["source_pages"], told["destination_pages"]) == ({"full": [1]}, {"full": [2]})
    assert told["after_prefill_s"] == pytest.approx(0.1)
