"""The entry point `sglang.srt.plugins`: makes the backend `kvbridge` known to SGLang. SGLang calls `register` in each process."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from enum import Enum
from typing import Any

from kvbridge.engine.sglang import BACKEND

KV_CLASS = "sglang.srt.disaggregation.utils.get_kv_class"
SHOWING = (
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue._init_kv_manager",
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._init_kv_manager",
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender",
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue",
)
SENDS_PAGES = "sglang.srt.disaggregation.decode.DecodePreallocQueue.pop_preallocated"
SHOWN: ContextVar[tuple[Any, ...]] = ContextVar("kvbridge_sglang_call")
"""The queue of SGLang's scheduler that makes one of our objects, and the request that a sender or a receiver is for. SGLang passes
neither on: a manager does not hear which pools its arguments describe, a sender hears of its room only."""


def register() -> None:
    """Add the backend to SGLang's choices, and the hooks that give the backend what SGLang does not pass on."""
    from sglang.srt.disaggregation import utils  # noqa: PLC0415 - only SGLang calls this
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415
    from sglang.srt.server_args import add_disagg_transfer_backend_choices  # noqa: PLC0415

    ours = add_member(utils.TransferBackend, "KVBRIDGE", BACKEND)
    add_disagg_transfer_backend_choices([BACKEND])

    def class_of(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
        if transfer_backend is not ours:
            return original(transfer_backend, class_type)
        from kvbridge.engine.sglang import backend  # noqa: PLC0415 - other backends do without it

        return backend.CLASSES[class_type.value]

    def as_mooncake(original: Callable[..., Any], queue: Any, *more: Any, **named: Any) -> Any:
        """SGLang names the two kinds of pages of HiSparse only to a backend that is called Mooncake."""
        if queue.transfer_backend is not ours:
            return original(queue, *more, **named)
        queue.transfer_backend = utils.TransferBackend.MOONCAKE
        try:
            return original(queue, *more, **named)
        finally:
            queue.transfer_backend = ours

    hooks = {KV_CLASS: class_of, SENDS_PAGES: as_mooncake}
    hooks |= dict.fromkeys(SHOWING, _shown)
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def add_member(enum: type[Enum], name: str, value: str) -> Any:
    """Add a member to an enum in place, so that modules that have imported the enum know the member too."""
    if value not in enum._value2member_map_:
        member = object.__new__(enum)
        member._name_, member._value_ = name, value
        enum._member_names_.append(name)
        enum._member_map_[name] = member
        enum._value2member_map_[value] = member
        type.__setattr__(enum, name, member)  # the enum itself refuses to set a member
    return enum(value)


def _shown(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    token = SHOWN.set(args)
    try:
        return original(*args, **named)
    finally:
        SHOWN.reset(token)
