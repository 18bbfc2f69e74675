"""The report of a demo reads well in any width and says what is wrong."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from kvbridge.testbed.demo.report import HostTokens, is_scattered
from kvbridge.testbed.demo.report_table import format_bytes, print_report
from tests.unit.testbed.demo_reports import HOT_BUFFER, report, request, sparse_request


def printed(made, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_report(made, console)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_table_fits_and_is_whole(width):
    requests = [request(number, tokens=tokens) for number, tokens in ((9, 4099), (10, 1), (24, 11_098))]
    lines = printed(report(*requests), width).splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    rows = [line.split() for line in lines[1:4]]
    assert [row[1] for row in rows] == ["4,099", "1", "11,098"]
    assert {row[-1] for row in rows} == {"yes"}
    assert lines[-1] == "EQUAL: 3 of 3 requests gave the very logits of the model alone"


def test_a_wide_table_has_a_column_for_each_component():
    header = printed(report(), 140).splitlines()[0]
    for title in ("c4 ", "c4 idx", "c128 ", "window", "c4 state", "idx state", "c128 state"):
        assert title in header


def test_the_totals_add_up():
    made = report(request(1, tokens=1024), request(2, tokens=3072))
    total = next(line for line in printed(made, 80).splitlines() if line.split()[:1] == ["4,096"]).split()
    assert total[-5:] == ["56", "1000.0", "112", "12.5", "yes"]
    assert total[1:3] == ["4.0M", "8.0M"]


def test_a_different_request_shows():
    made = report(request(1), request(2, first_difference=3))
    text = printed(made, 80)
    assert not made.equal
    assert not made.good
    assert [line.split()[-1] for line in text.splitlines()[1:3]] == ["yes", "NO"]
    assert "DIFFERENT: 1 of 2" in text


def test_pages_that_did_not_come_back_are_no_success():
    made = report(pages_left=3)
    assert made.equal
    assert not made.good
    assert "3 pages were not given back" in printed(made, 80)


def test_quantisation_is_reported():
    apart = {"mean_kl": 0.00755, "top1_agreement": 0.867}
    text = printed(report(request().model_copy(update=apart)), 140)
    assert "7.55e-03" in text
    assert "86.7%" in text


@pytest.mark.parametrize("width", [80, 140])
def test_sparse_decode_has_a_table_of_its_own(width):
    requests = [sparse_request(1, tokens=2049), sparse_request(2, tokens=998_000, loaded=55_000)]
    lines = printed(report(*requests, hot_buffer=HOT_BUFFER), width).splitlines()
    assert max(map(len, lines)) <= width or lines[-1].startswith("EQUAL")
    begin = next(number for number, line in enumerate(lines) if "in slots" in line)
    assert lines[begin + 1].split() == [*("1", "592", "61,440", "9.8%", "57.7%", "20,000", "19,616", "192", "yes")]
    assert lines[begin + 4].split() == [*("122,880", "9.8%", "29.2%", "75,000", "74,232", "384", "yes")]
    text = " ".join(line.strip() for line in lines)
    assert "640 steps, 1,920 swap-ins of up to 64 rows, in 3 C4 layers; 39.0% of the selected rows" in text
    assert "128 rows and a ring of 128 a layer, 1.5M a request with its tables" in text
    assert "the longest C4 cache has 249,580 rows a layer, 1.4G on the host" in text
    assert "with at most 4.5e-04 of the difference that rounding explains" in text
    assert lines[-1] == "EQUAL: 2 of 2 requests gave the very logits of the model alone"


def test_a_whole_cache_has_no_such_table():
    text = printed(report(), 140)
    assert "in slots" not in text
    assert "Hot buffer" not in text


def test_json_has_what_sparse_decode_did():
    document = json.loads(report(sparse_request(), hot_buffer=HOT_BUFFER).model_dump_json())
    assert document["hot_buffer"]["hot_rows"] == 128
    assert document["requests"][0]["sparse"]["loaded"] == 20_000
    assert document["requests"][0]["share_of_rounding"] == 4.5e-4


def test_page_ids_are_compared_by_space():
    found = report(request(), request(2)).page_ids
    assert {space: (ids.different, ids.compared) for space, ids in found.items()} == {
        "full": (2, 2),
        "host": (0, 2),
        "swa": (2, 2),
        "request": (0, 2),
    }
    assert "host 0/2" in printed(report(request(), request(2)), 140)


def test_scattered_pages_are_recognised():
    assert not is_scattered(request())
    assert is_scattered(request().model_copy(update={"source_pages": {"full": (4, 6)}}))


def test_json_has_the_verdict_and_what_it_follows_from():
    document = json.loads(report(request(1, first_difference=0)).model_dump_json())
    assert document["equal"] is False
    assert document["requests"][0]["equal"] is False
    assert document["requests"][0]["amounts"]["c4_kv"]["bytes"] > 0


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "-"), (999, "999"), (1000, "1.0K"), (1536, "1.5K"), (102_400, "100K"), (1_047_000, "1.0M"), (5 << 30, "5.0G")],
)
def test_bytes_are_short(count, text):
    assert format_bytes(count) == text
    assert len(text) <= 5


def turn(number: int, *, prefix_tokens: int, computed_tokens: int, **more):
    facts = {"conversation": 1, "turn": number, "page_keys": True, "spared_bytes": 1 << 20, "arrival_s": 0.25}
    held = {"prefix_tokens": prefix_tokens, "computed_tokens": computed_tokens}
    return request(number, tokens=1024).model_copy(update={**facts, **held, **more})


@pytest.mark.parametrize("width", [80, 110])
def test_turns_say_what_was_held_computed_and_sent(width):
    hit = turn(2, prefix_tokens=768, computed_tokens=512, by_itself=True)
    cold = turn(3, prefix_tokens=0, computed_tokens=0, by_itself=True, page_keys=False, arrival_s=1.0, spared_bytes=0)
    outlier = {"prefix_tokens": 0, "computed_tokens": 0, "by_itself": True, "arrival_s": 60.0, "spared_bytes": 0}
    others = [hit, cold, turn(2, page_keys=True, **outlier), turn(3, page_keys=False, **outlier)]
    made = report(turn(1, prefix_tokens=0, computed_tokens=0, spared_bytes=0), hit, cold, *others, turns=2)
    text = printed(made, width)
    assert made.good
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    row = next(line for line in text.splitlines() if line.split()[:4] == ["2", "2", "of", "1"])
    assert row.split()[4:] == ["1,024", "768", "512", "28.0M", "29.0M", "250", "yes"]
    assert (
        "after 1,000 ms without reuse and after 250 ms with it: 4.0 times as fast (medians of 3 each, in turns)"
        in " ".join(text.split())
    )


@pytest.mark.parametrize(("decode", "prefill"), [(0, 0), (256, 0), (0, 256)])
def test_turns_that_reuse_nothing_on_one_side_are_no_success(decode, prefill):
    made = report(turn(1, prefix_tokens=decode, computed_tokens=prefill), turns=2)
    assert made.equal
    assert not made.good
    assert "Nothing was reused on one of the two sides" in printed(made, 110)


@pytest.mark.parametrize(("decode", "prefill"), [(0, 0), (256, 0), (0, 256), (256, 256)])
def test_with_a_host_tier_something_has_to_come_back_on_both_sides(decode, prefill):
    came = HostTokens(decode=decode, prefill=prefill)
    made = report(turn(2, prefix_tokens=768, computed_tokens=512, host_tokens=came), turns=2, host_tier=True)
    assert made.equal
    assert made.good == bool(decode and prefill)
    text = " ".join(printed(made, 110).split())
    assert f"on decode {768 - decode:,} tokens of prefixes came from the device and {decode:,} from host memory" in text
    assert (
        f"on prefill {512 - prefill:,} tokens of prefixes came from the device and {prefill:,} from host memory" in text
    )
    assert ("Nothing came back from host memory on one of the two sides" in text) != made.good
