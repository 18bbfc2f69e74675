"""The admission section of the configuration as the limits that the desk takes.

Owns: that translation. Must not know: rooms, pages.
"""

from __future__ import annotations

from kvbridge.config.admission import AdmissionConfig
from kvbridge.node.admission.controller import AdmissionLimits, ClientCaps


def admission_limits(config: AdmissionConfig) -> AdmissionLimits:
    """Return the limits; a client without a cap of its own has everybody's."""
    everybody = ClientCaps(config.client_max_rooms, config.client_max_waiting)
    return AdmissionLimits(
        max_rooms=config.max_rooms,
        max_wait_s=config.max_wait_s,
        max_waiting=config.max_waiting,
        max_overtakes=config.max_overtakes,
        retry_after_min_s=config.retry_after_min_s,
        retry_after_max_s=config.retry_after_max_s,
        unready_after_s=config.unready_after_s,
        client=everybody,
        clients={
            name: ClientCaps(
                everybody.max_rooms if own.max_rooms is None else own.max_rooms,
                everybody.max_waiting if own.max_waiting is None else own.max_waiting,
            )
            for name, own in config.clients.items()
        },
    )
