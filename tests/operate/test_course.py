"""The course of `make test-operate` is complete, and would notice what is wrong."""

from __future__ import annotations

from tests.operate.__main__ import judged, slowest_s
from tests.operate.faults import Fault
from tests.operate.rules import alerts
from tests.operate.tier_faults import FAULTS

NONE = frozenset[str]()


def test_every_alert_has_a_fault_that_it_is_for() -> None:
    assert frozenset().union(*(fault.alerts for fault in FAULTS)) == set(alerts())
    assert frozenset().union(*(fault.besides for fault in FAULTS)) <= set(alerts())
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_a_fault_is_judged() -> None:
    fault = Fault("x", stage=None, alerts=frozenset({"A", "B"}), besides=frozenset({"C"}))  # type: ignore[arg-type]
    assert not judged(fault, {"A", "B"}, set(), 10)
    assert not judged(fault, {"A", "B", "C"}, set(), 10)
    assert judged(fault, {"A", "C"}, set(), 10) == "not within 10 s: B"
    assert judged(fault, {"A", "B", "D"}, set(), 10) == "not for this fault: D"
    assert judged(fault, {"A", "B"}, {"C"}, 10) == "before the fault: C"


def test_an_alert_has_as_long_as_its_rule_takes() -> None:
    assert slowest_s({"KvbridgeWorkerDied"}) == 300
    assert slowest_s({"KvbridgeWorkerDied", "KvbridgePeerSlow"}) == 900
