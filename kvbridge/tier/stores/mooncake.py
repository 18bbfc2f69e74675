"""A store in a Mooncake Store: objects in the memory of other hosts, moved from and into ours without a copy in between.

The library's behaviour (0.3.13, measured, and read in its source), and the consequences here:

- `setup` keeps the interpreter for up to 97 s while no master answers; it succeeds when one comes meanwhile. A get waits 4.4 s for
  a master that is gone, and a transfer 60 s for an owner that is silent. Therefore a process of its own uses it (`client`).
- A transfer that it has waited for in vain is not ended. `transfer failed` is therefore not settled, nor is a call that took longer
  than a call in which all transfers end. An object of another length fails the same way before anything is moved: its length is
  asked.
- `put` of a name that is there answers success and keeps what is there, of whatever length. A name is given to the same bytes only,
  so that is right; a bad object is removed by whoever reads it, `force`d, since reading has given it a lease.
- Its answers may be fewer than the names (none at all before `setup`): then nothing is known.
- Over TCP it does not ask whether memory is registered, over RDMA it does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvbridge.config.tier import MooncakeStoreSettings
from kvbridge.config.transports import MooncakeProtocol
from kvbridge.core.errors import WITH_LIBRARIES, NotReadyError, RegistrationError, TransportError
from kvbridge.core.process import monotonic
from kvbridge.tier.stores.objects import BROKEN, Answer, Outcome, StoredObject

ADAPTERS = Path("/sys/class/infiniband")
LIBRARY_ERRORS = (RuntimeError, ValueError, IndexError, OverflowError, MemoryError)
"""C++ exceptions in Python."""
TRANSFER_WAIT_S = 50.0
"""Less than the 60 s after which the library gives up on a transfer that is under way."""

NO_HANDLE = -200
INVALID = -600
MISSING = frozenset({-702, -703, -704, -710, -712})
"""No replica that could be read, or no object."""
LEASE_EXPIRED = -707
CHECKSUM = -801
TRANSFER_FAILED = -800
RPC_FAILED = frozenset({-900, -901})

READ_OUTCOMES = {
    **dict.fromkeys(MISSING, Outcome.ABSENT),
    INVALID: Outcome.SHORT,
    LEASE_EXPIRED: Outcome.TIMED_OUT,  # so slow that other bytes may have come into the place meanwhile
    CHECKSUM: Outcome.WRONG_DIGEST,
    **dict.fromkeys(RPC_FAILED, Outcome.UNREACHABLE),  # it could not ask where the object is, so nothing was moved
}
WRITE_OUTCOMES = {
    0: Outcome.STORED,
    NO_HANDLE: Outcome.FULL,
    **dict.fromkeys(RPC_FAILED, Outcome.UNREACHABLE),  # before the transfers, or after their end
}
REMOVE_OUTCOMES = {
    0: Outcome.DROPPED,
    **dict.fromkeys(MISSING, Outcome.DROPPED),
    **dict.fromkeys(RPC_FAILED, Outcome.UNREACHABLE),
}
PRESENCE = {1: Outcome.PRESENT, 0: Outcome.ABSENT}


class MooncakeStore:
    """Objects in a Mooncake Store, with the methods of `FileStore`; deadlines are not kept. Calls end with the process at last."""

    kind, batch = "mooncake", 16

    def __init__(self, settings: MooncakeStoreSettings) -> None:
        """Connect to the master.

        Raises TransportError without the library or an adapter, NotReadyError when no master answers (after 97 s).
        """
        if settings.protocol is MooncakeProtocol.RDMA and not any(ADAPTERS.glob("*")):
            raise TransportError(
                "this host has no RDMA adapter, and mooncake would use TCP without saying so; install the adapter's driver and "
                "pass /dev/infiniband into the container, or set the store's protocol to tcp"
            )
        # The library reads this once a process.
        os.environ.setdefault("MC_LOG_LEVEL", "WARNING")
        try:
            from mooncake.store import MooncakeDistributedStore, ReplicateConfig  # noqa: PLC0415 - costs a second
        except ImportError as error:
            raise TransportError(
                f"the store of the mooncake library cannot be loaded ({error}); {WITH_LIBRARIES}, "
                "and the system package libibverbs1"
            ) from error
        self._library: Any = MooncakeDistributedStore()
        self._config = ReplicateConfig()
        self._config.replica_num = settings.replicas
        code = self._library.setup(
            settings.host, "P2PHANDSHAKE", 0, 0, settings.protocol.value, settings.device_name, settings.master
        )
        if code != 0:
            raise NotReadyError(
                f"no Mooncake master answers at {settings.master} (setup answered {code}); start it, or check the name"
            )

    def use_memory(self, regions: Sequence[tuple[int, int]]) -> None:
        """Register memory with the library. Raises RegistrationError."""
        for address, length in regions:
            code = self._library.register_buffer(address, length)
            if code != 0:
                raise RegistrationError(
                    f"mooncake cannot register {length} bytes of host memory at {address:#x} (it answered {code}); check the "
                    "limits on locked memory, and the adapter"
                )

    def write(self, objects: Sequence[StoredObject], until_s: float) -> Answer:  # noqa: ARG002 - see the class
        call, apart = self._library.batch_put_from_multi_buffers, _apart(objects)
        return _ask(WRITE_OUTCOMES, len(objects), lambda: call(*apart, self._config))

    def read(self, objects: Sequence[StoredObject], until_s: float) -> Answer:  # noqa: ARG002 - see the class
        def get() -> list[int]:
            codes: list[int] = self._library.batch_get_into_multi_buffers(*_apart(objects))
            if len(codes) != len(objects):
                return codes
            return [self._read_code(each, code) for each, code in zip(objects, codes, strict=True)]

        return _ask(READ_OUTCOMES | {1: Outcome.HIT}, len(objects), get)

    def present(self, names: Sequence[str], until_s: float) -> Answer:  # noqa: ARG002 - see the class
        answer = _ask(READ_OUTCOMES | PRESENCE, len(names), lambda: self._library.batch_is_exist(list(names)))
        return answer.model_copy(update={"settled": True})  # it moves nothing

    def remove(self, names: Sequence[str], until_s: float) -> Answer:  # noqa: ARG002 - see the class
        answer = _ask(REMOVE_OUTCOMES, len(names), lambda: self._library.batch_remove(list(names), True))
        return answer.model_copy(update={"settled": True})

    def clear(self, prefix: str, until_s: float) -> Answer:  # noqa: ARG002 - see the class
        try:
            code = int(self._library.remove_by_regex(f"^{prefix}.*", True))
        except LIBRARY_ERRORS as error:
            return Answer.of_all(Outcome.UNREACHABLE, 1, detail=f"mooncake failed: {error}")
        if code < 0:
            return Answer.of_all(Outcome.UNREACHABLE, 1, detail=f"mooncake answered {code}")
        return Answer(outcomes=(Outcome.DROPPED,), cleared=code)

    def close(self) -> None:
        self._library.close()

    def _read_code(self, each: StoredObject, code: int) -> int:
        """Return 1 for a whole object, INVALID for an object of another length, else the library's code."""
        if code >= 0:
            return 1 if code == each.length_bytes else INVALID
        if code == TRANSFER_FAILED and 0 <= self._library.get_size(each.name) != each.length_bytes:
            return INVALID
        return code


def _apart(objects: Sequence[StoredObject]) -> tuple[list[str], list[list[int]], list[list[int]]]:
    return (
        [each.name for each in objects],
        [each.stretches[:, 0].tolist() for each in objects],
        [each.stretches[:, 1].tolist() for each in objects],
    )


def _ask(meanings: dict[int, Outcome], count: int, call: Callable[[], list[int]]) -> Answer:
    """Call the library and translate its codes. An answer with a code that has no meaning here is not settled."""
    begun_s = monotonic()
    try:
        codes = call()
    except LIBRARY_ERRORS as error:
        return Answer.of_all(Outcome.UNREACHABLE, count, settled=False, detail=f"mooncake failed: {error}")
    if len(codes) != count:
        detail = f"mooncake gave {len(codes)} answers for {count} objects"
        return Answer.of_all(Outcome.UNREACHABLE, count, settled=False, detail=detail)
    odd = sorted({code for code in codes if meanings.get(code, Outcome.UNREACHABLE) in BROKEN})
    settled = meanings.keys() >= set(codes) and monotonic() - begun_s < TRANSFER_WAIT_S
    detail = f"mooncake answered {', '.join(map(str, odd))}" if odd else ""
    outcomes = tuple(meanings.get(code, Outcome.UNREACHABLE) for code in codes)
    return Answer(outcomes=outcomes, settled=settled, detail=detail)
