"""The admission section of the configuration: what is refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from kvbridge.config.admission import AdmissionConfig


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
