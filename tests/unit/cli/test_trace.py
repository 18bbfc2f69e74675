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


def test_all_of_it_in_order(tmp_path):
    requests = read_trace(write_trace(tmp_path / "t.jsonl", 5))
    assert [request.timestamp for request in requests] == [0, 50, 100, 150, 200]
    assert (requests[2].input_length, requests[2].output_length, requests[2].hash_ids) == (1000, 7, (0, 2))


def test_a_part_of_it(tmp_path):
    requests = read_trace(write_trace(tmp_path / "t.jsonl", 9), start=3, count=2)
    assert [request.timestamp for request in requests] == [150, 200]


def test_lines_behind_the_part_are_not_looked_at(tmp_path):
    path = write_trace(tmp_path / "t.jsonl", 3)
    path.write_text(path.read_text() + "rubbish\n")
    assert len(read_trace(path, count=3)) == 3
    assert "line 4" in refused(path)


def test_blank_lines_and_other_keys_do_no_harm(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("\n" + json.dumps({"timestamp": 1, "input_length": 2, "output_length": 0, "user": "x"}) + "\n\n")
    assert read_trace(path)[0].hash_ids == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_length": 0}, "input_length"),
        ({"input_length": "many"}, "input_length"),
        ({"output_length": -1}, "output_length"),
        ({"timestamp": -5}, "timestamp"),
        ({"timestamp": 1e999}, "timestamp"),
        ({"hash_ids": [1, -2]}, "hash_ids.1"),
        ({"input_length": 1 << 40}, "input_length"),
    ],
)
def test_a_wrong_value_is_named_with_its_line(tmp_path, changes, words):
    path = write_trace(tmp_path / "t.jsonl", 2)
    path.write_text(path.read_text() + json.dumps(trace_line(2, **changes)) + "\n")
    told = refused(path)
    assert "line 3" in told
    assert words in told


def test_a_missing_value_is_named(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 1, "output_length": 3}\n')
    assert "line 1: has no 'input_length'" in refused(path)


def test_time_that_runs_backwards_is_refused(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(trace_line(0, timestamp=at)) + "\n" for at in (10, 20, 15)))
    assert "line 3: timestamp 15 comes after 20" in refused(path)


def test_no_file_no_text_no_requests(tmp_path):
    assert "No such file" in refused(tmp_path / "none")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "not a text file" in refused(binary)
    empty = tmp_path / "empty"
    empty.write_text("")
    assert "no request" in refused(empty)
    assert "has 2 requests after the first 1, --count asks for 3" in refused(
        write_trace(tmp_path / "t", 3), start=1, count=3
    )
    assert "Is a directory" in refused(tmp_path)
