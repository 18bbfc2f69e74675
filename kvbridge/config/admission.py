"""Settings of admission on a prefill or decode daemon: who waits for pages, how long, and how much one client may have."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from kvbridge.config.endpoints import Seconds
from kvbridge.core.ids import FrozenModel, NonNegative, Positive

ClientName = Annotated[str, Field(max_length=200)]


class ClientAdmission(FrozenModel):
    """Caps of one client by name; what is null is as for everybody."""

    max_rooms: NonNegative | None = None
    """In place of `client_max_rooms`."""
    max_waiting: NonNegative | None = None
    """In place of `client_max_waiting`."""


class AdmissionConfig(FrozenModel):
    """What happens to requests that do not fit, and what one client may have."""

    max_rooms: Positive = 10_000
    """Rooms on this daemon, beyond which requests are refused as when pages lack. Pools bound them too, but for those that engines
    own."""
    max_wait_s: Seconds = 30.0
    """Longest `wait_s` of a request that is served: so long it may wait for pages."""
    max_waiting: NonNegative = 1_000
    """Requests that wait for pages at once; beyond it they are refused at once. 0: nobody waits."""
    max_overtakes: NonNegative = 16
    """So many others are admitted before a request that does not fit holds back the pages that it needs. Higher keeps
    pools fuller, lower lets large requests in sooner."""
    client_max_rooms: NonNegative = 0
    """Rooms and waiting requests of one client on this daemon, beyond which it is answered 429; 0: no limit."""
    client_max_waiting: NonNegative = 0
    """Waiting requests of one client, beyond which it is answered 429; 0: no limit."""
    clients: dict[ClientName, ClientAdmission] = Field(default_factory=dict)
    """Clients with caps of their own, by name, each as {max_rooms: 64, max_waiting: 8}."""
    retry_after_min_s: Seconds = 0.1
    """Shortest time after which a refused caller is told to come back."""
    retry_after_max_s: Seconds = 30.0
    """Longest time after which a refused caller is told to come back."""
    unready_after_s: Seconds = 30.0
    """/ready turns red when not even the smallest request fitted for so long."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.retry_after_min_s > self.retry_after_max_s:
            raise ValueError(
                f"retry_after_min_s ({self.retry_after_min_s:g} s) must not exceed "
                f"retry_after_max_s ({self.retry_after_max_s:g} s)"
            )
        return self
