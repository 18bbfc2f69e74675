"""The admission section of the configuration: what is refused, and what the admission is given."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from kvbridge.config.admission import AdmissionConfig
from kvbridge.daemon.admission import admission_limits
from kvbridge.node.admission.controller import AdmissionLimits, ClientCaps


def test_the_defaults_of_both_agree():
    assert admission_limits(AdmissionConfig()) == AdmissionLimits()


def test_a_client_keeps_everybody_s_cap_where_it_has_none_of_its_own():
    section = {
        "client_max_rooms": 4,
        "client_max_waiting": 2,
        "clients": {"batch": {"max_rooms": 64}, "free": {"max_rooms": 0, "max_waiting": 0}},
    }
    limits = admission_limits(AdmissionConfig.model_validate(section))
    assert limits.of("anybody") == ClientCaps(4, 2)
    assert limits.of("batch") == ClientCaps(64, 2)
    assert limits.of("free") == ClientCaps(0, 0)


@pytest.mark.parametrize(
    "section",
    [
        {"retry_after_min_s": 31},
        {"max_wait_s": 0},
        {"client_max_rooms": -1},
        {"clients": {"a": {"rooms": 1}}},
        {"clients": {"a" * 201: {}}},
    ],
)
def test_what_cannot_be_meant_is_refused(section):
    with pytest.raises(ValidationError):
        AdmissionConfig.model_validate(section)
