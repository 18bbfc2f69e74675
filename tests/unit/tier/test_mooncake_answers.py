"""The answers of Mooncake's store: their outcomes, and whether the memory of a request may be used again."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbridge.config.tier import MooncakeStoreSettings
from kvbridge.core.errors import TransportError
from kvbridge.tier.stores import mooncake
from kvbridge.tier.stores.mooncake import MooncakeStore
from kvbridge.tier.stores.objects import BROKEN
from tests.helpers.stored_pages import stored_object

LENGTH = 100
OBJECTS = [stored_object(name, ctypes.create_string_buffer(60), ctypes.create_string_buffer(40)) for name in ("a", "b")]


class FakeLibrary:
    def __init__(self, codes: list[int] | Exception, size: int = LENGTH) -> None:
        self.codes, self.size = codes, size

    def _answer(self, *_: object) -> list[int]:
        if isinstance(self.codes, Exception):
            raise self.codes
        return self.codes

    batch_put_from_multi_buffers = batch_get_into_multi_buffers = batch_is_exist = batch_remove = _answer

    def get_size(self, name: str) -> int:
        return self.size


def asked(verb: str, library: FakeLibrary) -> tuple[list[str], bool, str]:
    store = MooncakeStore.__new__(MooncakeStore)
    store._library, store._config = library, None
    answer = getattr(store, verb)(OBJECTS if verb in {"read", "write"} else ["a", "b"], 0.0)
    return [outcome.value for outcome in answer.outcomes], answer.settled, answer.detail


@pytest.mark.parametrize(
    ("verb", "code", "outcome", "settled"),
    [
        ("read", LENGTH, "hit", True),
        ("read", LENGTH - 1, "short", True),
        ("read", LENGTH + 1, "short", True),
        ("read", 0, "short", True),
        ("read", 1, "short", True),
        ("read", -600, "short", True),
        ("read", -704, "absent", True),
        ("read", -707, "timed_out", True),
        ("read", -801, "wrong_digest", True),
        ("read", -900, "unreachable", True),
        ("read", -800, "unreachable", False),
        ("read", -12345, "unreachable", False),
        ("write", 0, "stored", True),
        ("write", -200, "full", True),
        ("write", -900, "unreachable", True),
        ("write", -800, "unreachable", False),
        ("write", 7, "unreachable", False),
        ("present", 1, "present", True),
        ("present", 0, "absent", True),
        ("present", -900, "unreachable", True),
        ("remove", 0, "dropped", True),
        ("remove", -704, "dropped", True),
        ("remove", -706, "unreachable", True),
        ("remove", -900, "unreachable", True),
    ],
)
def test_each_answer(verb: str, code: int, outcome: str, settled: bool):
    good = {"read": LENGTH, "write": 0, "present": 1, "remove": 0}[verb]
    outcomes, found, detail = asked(verb, FakeLibrary([good, code]))
    assert (outcomes[1], found) == (outcome, settled)
    assert outcomes[0] not in BROKEN, "one's fault is not the other's"
    assert (str(code) in detail) == (outcome in BROKEN)


@pytest.mark.parametrize("verb", ["read", "write", "present", "remove"])
@pytest.mark.parametrize("codes", [[], [0], [0, 0, 0], RuntimeError("broken"), IndexError("odd")], ids=repr)
def test_what_says_nothing_about_each_settles_nothing(verb: str, codes: list[int] | Exception):
    outcomes, settled, detail = asked(verb, FakeLibrary(codes))
    assert outcomes == ["unreachable"] * 2
    assert settled is (verb in {"present", "remove"}), "these move nothing"
    assert "mooncake" in detail


def test_rdma_without_an_adapter_is_refused_instead_of_becoming_tcp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mooncake, "ADAPTERS", tmp_path)
    with pytest.raises(TransportError, match="protocol to tcp"):
        MooncakeStore(MooncakeStoreSettings(master="127.0.0.1:1", protocol="rdma"))


@pytest.mark.parametrize(("took_s", "settled"), [(49.0, True), (61.0, False)])
def test_a_call_that_may_have_given_up_on_a_transfer_settles_nothing(monkeypatch, took_s, settled):
    times: Callable[[], float] = iter([0.0, took_s]).__next__
    monkeypatch.setattr(mooncake, "monotonic", times)
    assert asked("write", FakeLibrary([-900, -900]))[1] is settled
