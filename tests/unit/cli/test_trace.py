"""What is read of a trace, and what is said of a wrong one."""

from __future__ import annotations

import json

import pytest

from kvbridge.cli.trace import read_trace
from kvbridge.core.errors import InvalidInputError
from tests.helpers.traces import trace_line, write_trace


def refused(path, **wanted) -> str:
    with pytest.raises(InvalidInputError) as caught:
        read_trace(path, **wanted)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_all_of_it_in_order_or_a_part_of_it(tmp_path):
    path = write_trace(tmp_path / "t.jsonl", 5)
    requests = read_trace(path)
    assert [request.timestamp for request in requests] == [0, 50, 100, 150, 200]
    assert (requests[2].input_length, requests[2].output_length, requests[2].hash_ids) == (1000, 7, (0, 2))
    path.write_text(path.read_text() + "rubbish\n")
    assert len(read_trace(path, count=5)) == 5, "no more is looked at"
    assert "line 6" in refused(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_length": 0}, "input_length"),
        ({"input_length": 1 << 40}, "input_length"),
        (
            {"output_length": "many"},
            "output_length: Input should be a valid integer, unable to parse string as an integer, got 'many'",
        ),
        ({"timestamp": 1e999}, "timestamp"),
        ({"timestamp": 49}, "timestamp 49 comes after 50"),
        ({"hash_ids": [1, -2]}, "hash_ids.1"),
    ],
)
def test_a_wrong_value_is_named_with_its_line(tmp_path, changes, words):
    path = write_trace(tmp_path / "t.jsonl", 2)
    path.write_text(path.read_text() + json.dumps(trace_line(2, **changes)) + "\n")
    told = refused(path)
    assert "line 3" in told
    assert words in told


def test_what_is_missing_is_named(tmp_path):
    path = tmp_path / "t.jsonl"
    for content, words in (
        (b'{"timestamp": 1, "output_length": 3}\n', "line 1: has no 'input_length'"),
        (b"\xff\xfe\x00", "not a text file"),
        (b"", "has 0 requests, 1 are asked for"),
    ):
        path.write_bytes(content)
        assert words in refused(path)
    assert "No such file" in refused(tmp_path / "none")
    short = write_trace(tmp_path / "short", 3)
    assert "has 3 requests, 4 are asked for" in refused(short, count=4)
