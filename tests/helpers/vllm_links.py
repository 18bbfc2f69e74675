"""The node of the connector's halves in tests: an attachment without its thread, over a link that a test has made."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from kvbridge.core.addresses import PeerAddress
from kvbridge.core.ids import Role
from kvbridge.engine.kit import Guard
from kvbridge.engine.kit.attachment import NodeAttachment
from kvbridge.engine.vllm.decode_rooms import DecodeRooms
from kvbridge.engine.vllm.groups import CacheGroup, CacheGroups, GroupKind
from kvbridge.engine.vllm.prefill_rooms import PrefillRooms
from kvbridge.engine.vllm.requests import Instance
from kvbridge.engine.vllm.stats import TransferStats
from tests.helpers.rooms import ADDRESS as NODE_ADDRESS

ADDRESS = PeerAddress(endpoint=NODE_ADDRESS.endpoint)


def instance(*roles: Role, block_tokens: int, tp_size: int = 1, **more: Any) -> Instance:
    facts = {"facts": {"model": "tiny"}, "kv_heads": 4, "latent": False, "engine_id": "e"}
    groups = CacheGroups((CacheGroup(GroupKind.FULL, block_tokens),), {}, BLOCKS)
    return Instance(roles=roles, tp_size=tp_size, pp_size=1, **{"groups": groups} | facts | more)


def attach(attachment: NodeAttachment, link: Any, incarnation: str) -> None:
    """Have an attachment find a node at its user's next look."""

    def say(kind: Any, room: int, **fields: Any) -> None:
        link.post(kind(call=link.number(), room=room, **fields))

    attachment._made = SimpleNamespace(events=lambda: link.events(0.0), say=say, incarnation=incarnation)


def rooms_at(
    role: Role,
    link: Any,
    *,
    block_tokens: int,
    ranks: int = 1,
    failures: list[str] | None = None,
    rooms: Sequence[int] = (),
) -> PrefillRooms | DecodeRooms:
    """The rooms at a node whose incarnation is `n1`, behind a link. `failures` takes the codes of errors that no hook lets out."""
    attachment = NodeAttachment(role, Path("/nowhere"))
    attach(attachment, link, "n1")
    kind = PrefillRooms if role is Role.PREFILL else DecodeRooms
    node = SimpleNamespace(endpoint=lambda: SimpleNamespace(control=ADDRESS if role is Role.PREFILL else None))
    told = [] if failures is None else failures
    made = kind(
        instance(role, block_tokens=block_tokens, tp_size=ranks), node, attachment, TransferStats(), Guard(told.append)
    )
    if rooms:
        made._draw_room = iter(rooms).__next__
    made.look()
    return made


BLOCKS, TOKENS = 7, 4


def name_of(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


def caches(
    layers: range, heads: int, content: int, order: str = "LBHNC", dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """Tensors [blocks, heads, tokens, content] of a rank's layers, in memory in the given order; all that they hold differs."""
    sizes = {"L": len(layers), "B": BLOCKS, "H": heads, "N": TOKENS, "C": content}
    memory = torch.empty([sizes[axis] for axis in order], dtype=dtype)
    memory.view(torch.uint8).random_(0, 256)
    logical = memory.permute([order.index(axis) for axis in "LBHNC"])
    return {name_of(layer): logical[place] for place, layer in enumerate(layers)}
