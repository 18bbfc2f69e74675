"""Lines of the log: their content, their number, and secrets."""

import io
import json
import logging
import sys

import pytest
import structlog
from structlog.testing import capture_logs

from kvbridge.telemetry.logs import MAX_KINDS, Seldom, configure_logs, leave_standard_output
from tests.helpers.manual_clock import ManualClock


@pytest.fixture(autouse=True)
def _restore():
    root = logging.getLogger()
    handlers, level, before = root.handlers[:], root.level, structlog.get_config()
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.configure(**before)


@pytest.fixture
def lines():
    stream = io.StringIO()
    configure_logs(names={"role": "prefill", "instance": "i1", "rank": ""}, level="info", form="json", stream=stream)
    return lambda: [json.loads(line) for line in stream.getvalue().splitlines()]


def test_secrets_are_blanked_wherever_they_lie(lines):
    structlog.get_logger("x").info(
        "start",
        http_token="hunter2",
        secret="hunter2",
        Authorization="hunter2",
        config={"curve_secret_key": "hunter2", "list": [{"api_key": "hunter2"}], "port": 5},
        prompt_tokens=7,
        computed_tokens=8,
        tokens=["hunter2"],
        public_key="seen",
    )
    (line,) = lines()
    assert "hunter2" not in json.dumps(line)
    assert line["config"]["port"] == 5
    assert (line["prompt_tokens"], line["computed_tokens"], line["public_key"]) == (7, 8, "seen")
    assert line["http_token"] == line["secret"] == "***"


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_traceback_shows_no_local_variables(form):
    stream = io.StringIO()
    configure_logs(names={"role": "prefill"}, form=form, stream=stream)

    secret = "hunter" + str(1 + 1)  # not in the source, whose lines a traceback shows

    def fail(token):
        raise ZeroDivisionError("it broke")

    try:
        fail(secret)
    except ZeroDivisionError:
        structlog.get_logger().exception("request failed")
    assert "it broke" in stream.getvalue()
    assert "in fail" in stream.getvalue()
    assert secret not in stream.getvalue()


def test_lines_that_strangers_cause_are_few():
    clock, left_out = ManualClock(), []
    seldom = Seldom(left_out.append, lines=3, every_s=10, clock=clock)
    assert sum(seldom.admits("frame_refused", "malformed") for _ in range(100)) == 3
    assert left_out == ["frame_refused"] * 97, "at once, whether anybody looks or not"
    assert seldom.admits("frame_refused", "stale"), "each kind by itself"
    assert sum(seldom.admits("library_output", "pp0.tp0", lines=50) for _ in range(100)) == 50
    with capture_logs() as lines:
        seldom.tell()
        assert lines == []
        clock.advance(10)
        assert sum(seldom.admits("frame_refused", "malformed") for _ in range(100)) == 3
        seldom.tell()
        seldom.tell(everything=True)
    assert [(line["of"], line["kind"], line["lines"], line["seconds"]) for line in lines] == [
        ("frame_refused", "malformed", 97 + 97, 10.0),
        ("library_output", "pp0.tp0", 50, 10.0),
    ]


def test_kinds_that_peers_make_up_cannot_fill_the_memory():
    left_out = []
    seldom = Seldom(left_out.append, lines=1, clock=ManualClock())
    assert sum(seldom.admits("peer_rejected", f"code-{number}") for number in range(1_000)) == MAX_KINDS + 1
    assert len(left_out) == 1_000 - MAX_KINDS - 1


@pytest.fixture
def engines_logs():
    """Logging as in an engine's process where nobody has set it up."""
    structlog.reset_defaults()
    leave_standard_output()


def test_an_engines_standard_output_is_its_own(engines_logs, capsys):
    structlog.get_logger("kvbridge.engine").warning("deferred_call_failed", call="release of room 3")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "deferred_call_failed" in printed.err


def test_an_engine_goes_on_when_nobody_reads_its_standard_error(engines_logs, monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    structlog.get_logger("kvbridge.engine").warning("load_failed", room=3)


def test_what_an_engine_logs_of_an_error_shows_no_values(engines_logs, capsys):
    """A local variable may be a prompt."""

    def fail(prompt):
        raise RuntimeError(f"{len(prompt)} tokens are too many")

    try:
        fail(list(range(123_456, 123_460)))
    except RuntimeError as error:
        structlog.get_logger("kvbridge.engine").error("hook_failed", exc_info=error)
    printed = capsys.readouterr().err
    assert "in fail" in printed
    assert "123456" not in printed
