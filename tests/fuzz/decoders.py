"""Every decoder that reads what another process has sent, as the one table that property tests and `make fuzz` walk."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgpack
import numpy as np
from pydantic import TypeAdapter, ValidationError

from kvbridge.api.directory import NodeHeartbeat, NodeRegistration, PairRequest
from kvbridge.api.problems import Problem, error_of, make_problem
from kvbridge.api.rooms import AdmissionRequest, RoomReport
from kvbridge.control.keys import generate_keys, parse_entry
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import BridgeError, ConfigError, InvalidInputError, TransportError
from kvbridge.core.geometry.manifest import check_manifest
from kvbridge.core.geometry.models import preset
from kvbridge.core.geometry.pages import tables_from_wire
from kvbridge.core.ids import IndexSpace, Rank, Role
from kvbridge.core.plan.operations import Amount, Section
from kvbridge.core.wire import engine_messages as engine, messages as wire, worker_messages as worker_wire
from kvbridge.core.wire.codec import (
    ENGINE_TO_NODE,
    NODE_TO_ENGINE,
    NODE_TO_WORKER,
    PEER,
    WORKER_TO_NODE,
    Envelope,
    FrameError,
    MessageCodec,
    pack_rank,
    unpack_rank,
)
from kvbridge.core.wire.messages import CudaOrigin, DeviceAllocationRequest, FileOrigin, SharedRegion, StreamPoint
from kvbridge.http.requests import problem_response
from kvbridge.node.prefill.early_offers import check_offer
from kvbridge.tier.stores import objects as store_wire
from kvbridge.tier.stores.objects import ObjectForm, Outcome, Verb
from kvbridge.transport.base import Endpoint, Extents, read_endpoint
from kvbridge.transport.local.transport import LocalEndpoint
from kvbridge.transport.mooncake.transport import MooncakeEndpoint
from kvbridge.transport.nixl.agent import NixlEndpoint
from tests.helpers.rooms import manifest

GEOMETRY = preset("tiny-v4")
RANK = Rank(pp=0, tp=0)
ME, YOU = "a" * 16, "b" * 16


@dataclass(frozen=True)
class Decoder:
    """`decode` returns, or raises one of `errors`, whatever it is given."""

    name: str
    family: str
    decode: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...]

    def feed(self, data: bytes) -> object:
        """Decode; a documented error is an answer like any other, and has a text that a log can hold."""
        try:
            return self.decode(data)
        except self.errors as error:
            text = str(error)
            assert text, "an error says what is wrong"
            return error


def frame(codec: MessageCodec, body: object, sequence: int = 1) -> bytes:
    """A frame as its real sender makes it."""
    return codec.encode(Envelope(ME, YOU, 7, sequence, 3, body))


def _table(space: IndexSpace, *ids: int, first_page: int = 0) -> wire.WireTable:
    return wire.WireTable(space=space, ids=np.array(ids, dtype="<i4").tobytes(), first_page=first_page)


TABLES = (_table(IndexSpace.FULL, 1, 2, 3), _table(IndexSpace.SWA, 1, 2), _table(IndexSpace.REQUEST, 0))
TABLES_BEHIND_A_PAGE = (_table(IndexSpace.FULL, 2, 3, first_page=1), *TABLES[1:])
MOVE = worker_wire.PageMove(device=_table(IndexSpace.FULL, 1, 2), twins=_table(IndexSpace.FULL_COPY, 4, 5))
ROOM = {"room": 2**52 + 5, "generation": 2}
ENDPOINTS = (wire.TransportEndpoint(transport="local", data=b"{}"), wire.TransportEndpoint(transport="nixl", data=b"x"))
DESCRIPTION = wire.RankDescription(manifest=manifest(GEOMETRY), endpoints=ENDPOINTS)
NODE = wire.NodeDescription(
    instance="decode-0",
    node="node-0",
    role=Role.DECODE,
    incarnation=ME,
    geometry=GEOMETRY,
    ranks=(pack_rank(DESCRIPTION),),
)
AMOUNTS = {"c4_kv": Amount(lane_rows=64, bytes=37_440, operations=1)}
REGION = SharedRegion(region=manifest(GEOMETRY).regions[0], origins=(FileOrigin(path="/dev/shm/x"),))
UUID = "0123456789abcdef" * 2
VRAM = SharedRegion(
    region=manifest(GEOMETRY).regions[0],
    origins=(CudaOrigin(handle=bytes(range(200, 256)) + b"8 bytes.", device_uuid=UUID, length_bytes=4096),),
)
POINT = StreamPoint(ring="r", handle=bytes(64), device_uuid=UUID)
STORED = ObjectForm([REGION.region])
PAGE_KEY = bytes(range(16))
SECTION = Section(prompt_tokens=600, start_token=0, stop_token=512, layers=(0, 1))

MESSAGES: dict[MessageCodec, tuple[object, ...]] = {
    PEER: (
        wire.Hello(node=NODE),
        wire.Welcome(instance="p", node="n", incarnation=ME, pp_size=1, tp_size=1, ranks=(RANK,)),
        wire.Rejected(code="conflict", message="no"),
        wire.Intend(**ROOM, prompt_tokens=600),
        wire.Offer(**ROOM, prompt_tokens=600, prefix_tokens=256, tables=TABLES_BEHIND_A_PAGE),
        wire.Abort(**ROOM, code="aborted", message="enough"),
        wire.Done(**ROOM, writer=RANK, amounts=AMOUNTS, phases_s={"move": 0.25}, metadata=b"first token"),
        wire.Failed(**ROOM, code="conflict", message="no"),
        wire.Drained(**ROOM),
        wire.PathLost(**ROOM, writer=RANK, transport="nixl", epoch=3),
        wire.Heartbeat(),
    ),
    NODE_TO_WORKER: (
        worker_wire.ConnectPeer(peer=ME, ranks=(pack_rank(DESCRIPTION),)),
        worker_wire.OpenRoom(**ROOM, peer=ME, prompt_tokens=600, prefix_tokens=0, source=TABLES, destination=TABLES),
        worker_wire.Send(**ROOM, order=1, section=SECTION, source=TABLES_BEHIND_A_PAGE, after=(POINT,)),
        worker_wire.WorkerSetup(
            geometry=GEOMETRY,
            rank=RANK,
            pp_size=1,
            tp_size=1,
            layers=(0, 1),
            device=(),
            allocate=DeviceAllocationRequest(device=1, page_counts={IndexSpace.FULL: 4}),
            host=(REGION,),
            transports="{}",
            transfer_timeout_s=1.0,
        ),
        worker_wire.CopyPages(order=1, moves=(MOVE,), link_share=0.5),
        worker_wire.CloseRoom(**ROOM),
        worker_wire.Shutdown(),
    ),
    store_wire.NODE_TO_STORE: (
        store_wire.StoreSetup(settings="{}", forms=((REGION,), (REGION, VRAM)), calls=4),
        store_wire.StoreOrder(number=1, verb=Verb.GET, form=1, keys=bytes(32), pages=bytes(8), until_s=12.5),
    ),
    store_wire.STORE_TO_NODE: (
        store_wire.StoreReady(kind="files"),
        store_wire.StoreFailed(message="no"),
        store_wire.StoreReport(number=1, outcomes=(Outcome.HIT, Outcome.SHORT), settled=False, detail="why"),
    ),
    WORKER_TO_NODE: (
        worker_wire.WorkerHello(rank=RANK, pid=1),
        worker_wire.WorkerReady(rank=RANK, pid=1, description=DESCRIPTION, device=(VRAM,)),
        worker_wire.PeerConnected(rank=RANK, peer=ME, transports=("local",)),
        worker_wire.PathsChanged(rank=RANK, peer=ME, transports=("local",), standby=("nixl",), lost="mooncake"),
        worker_wire.Rerouted(**ROOM, rank=RANK, lost="mooncake", over="nixl", epoch=3, in_transit=True),
        worker_wire.Sent(**ROOM, rank=RANK, order=1, amounts=AMOUNTS, seconds={"move": 0.1}),
        worker_wire.PagesCopied(rank=RANK, order=1, bytes=4_096, seconds=0.1),
        worker_wire.RoomClosed(**ROOM, rank=RANK, quiet=True),
    ),
    ENGINE_TO_NODE: (
        engine.Attach(call=1, role=Role.PREFILL, ranks=(RANK,)),
        engine.Detach(call=1),
        engine.Begin(call=2, room=5, prompt_tokens=600, tables=TABLES),
        engine.Publish(call=3, room=5, upto_token=512, layers=(0, 1), after={"pp0.tp0": POINT}),
        engine.Publish(call=3, room=5, upto_token=600, tables=TABLES_BEHIND_A_PAGE),
        engine.Hold(call=2, room=5, prompt_tokens=600, tables=TABLES, published_tokens=600, metadata=b"first token"),
        engine.Fetch(
            call=2,
            room=5,
            prompt_tokens=600,
            prefill=(PeerAddress(endpoint="tcp://10.0.0.7:7911"),),
            tables=TABLES_BEHIND_A_PAGE,
            prefix_tokens=256,
        ),
        engine.Finish(call=4, room=5, metadata=b"first token"),
        engine.AbortRoom(call=5, room=5, reason="enough"),
        engine.Loaded(call=6, room=5, generation=1),
    ),
    NODE_TO_ENGINE: (
        engine.Attached(
            call=1,
            instance="p",
            incarnation=ME,
            geometry=GEOMETRY,
            ranks=(RANK,),
            layers={"pp0.tp0": (0, 1)},
            pp_size=1,
            tp_size=1,
            device={"pp0.tp0": (REGION, VRAM)},
        ),
        engine.Detached(reason="the worker is gone"),
        engine.Pages(call=2, room=5, generation=1, prompt_tokens=600, tables=TABLES, amounts=AMOUNTS, load=TABLES),
        engine.RoomEvent(room=5, generation=1, kind="committed"),
    ),
}


def _frames(codec: MessageCodec) -> Decoder:
    def decode(data: bytes) -> object:
        envelope = codec.decode(data)
        _use(envelope.body)
        return envelope

    return Decoder(
        codec.name,
        "frames",
        decode,
        (FrameError, BridgeError),
        tuple(frame(codec, body, number) for number, body in enumerate(MESSAGES[codec], start=1)),
    )


def _use(body: object) -> None:
    """Check a message as a daemon does before it believes it."""
    match body:
        case wire.Hello():
            for packed in body.node.ranks:
                check_manifest(unpack_rank(packed).manifest, GEOMETRY)
        case wire.Intend() | wire.Offer():
            check_offer(body, GEOMETRY, prompt_tokens=body.prompt_tokens, prompt_digest=body.prompt_digest)
        case engine.Begin() | engine.Hold() | engine.Fetch() | engine.Publish() | worker_wire.Send():
            named = body.source if isinstance(body, worker_wire.Send) else body.tables
            tables_from_wire(named or ())


def _endpoint(name: str, content: type, seed: dict[str, object]) -> Decoder:
    def decode(data: bytes) -> object:
        found = read_endpoint(Endpoint(transport=name, data=data), name, content)
        pairs = [one if isinstance(one, tuple) else (one.address, one.length_bytes) for one in found.extents]
        return Extents("peer", pairs)

    return Decoder(
        f"{name}-endpoint", "endpoints", decode, (TransportError, InvalidInputError), (json.dumps(seed).encode(),)
    )


FILE = {"path": "/dev/shm/x", "device": 3, "inode": 4, "owner": 1000}
ENDPOINT_SEEDS = (
    ("mooncake", MooncakeEndpoint, {"session": "10.0.0.7:1", "protocol": "tcp", "extents": [[4096, 100], [8192, 5]]}),
    (
        "nixl",
        NixlEndpoint,
        {
            "agent": "kvbridge-0123",
            "metadata": "AAAA",
            "release": "1.5.1",
            "checksum": 0,
            "extents": [{"address": 4096, "length_bytes": 9, "kind": "dram", "device": 0}],
        },
    ),
    (
        "local",
        LocalEndpoint,
        {
            "claim": {"pid": 1, "boot_id": "x", "file": FILE, "secret": "0" * 64},
            "files": [FILE],
            "extents": [{"address": 4096, "length_bytes": 9, "origin": 0, "offset_bytes": 0}],
            "epoch": 0,
            "private": [],
        },
    ),
)


def _json(name: str, kind: object, *seeds: dict[str, object]) -> Decoder:
    adapter = TypeAdapter(kind)
    return Decoder(
        name, "bodies", adapter.validate_json, (ValidationError,), tuple(json.dumps(seed).encode() for seed in seeds)
    )


REGISTRATION = {
    "instance": "decode-0",
    "node": "node-0",
    "role": "decode",
    "incarnation": ME,
    "http_url": "http://127.0.0.1:1",
    "pp_size": 1,
    "tp_size": 1,
    "ranks": [{"pp": 0, "tp": 0}],
    "fingerprint": "0" * 32,
    "geometry": GEOMETRY.model_dump(mode="json"),
}
REPORT = {"room": 5, "generation": 1, "role": "decode", "state": "committed", "prompt_tokens": 600, "reason": "x"}


def _problem(data: bytes) -> object:
    error = error_of(503, data, source="http://10.0.0.7:7900")
    assert isinstance(error, BridgeError)
    # Whoever passes it on makes a problem of it again.
    retry_after_s = getattr(error, "retry_after_s", None)
    problem = make_problem(error.code, error.http_status, str(error), path="/", retry_after_s=retry_after_s)
    return Problem.model_validate_json(bytes(problem_response(problem).body))


def _key_lines(data: bytes) -> object:
    lines = data.decode(errors="surrogateescape").splitlines()
    return [parse_entry(line, f"line {number}") for number, line in enumerate(lines, start=1)]


DECODERS: tuple[Decoder, ...] = (
    *(_frames(codec) for codec in MESSAGES),
    *(_endpoint(*seed) for seed in ENDPOINT_SEEDS),
    _json("registration", NodeRegistration, REGISTRATION),
    _json("heartbeat", NodeHeartbeat, {"incarnation": ME, "ready": True, "load": {"rooms": 3}}),
    _json("admission", AdmissionRequest, {"prompt_tokens": 600, "prefill": [{"endpoint": "tcp://10.0.0.7:1"}]}),
    _json("pair-request", PairRequest, {"prompt_tokens": 600, "client": "router"}),
    _json("room-report", RoomReport, REPORT),
    Decoder(
        "problem",
        "bodies",
        _problem,
        (),
        (
            make_problem("capacity", 503, "full", path="/v1/requests", retry_after_s=2.5).model_dump_json().encode(),
            make_problem("stale", 409, "too late", path="/").model_dump_json().encode(),
        ),
    ),
    Decoder(
        "stored-object",
        "bodies",
        lambda data: STORED.read_trailer(PAGE_KEY, data),
        (),
        (STORED.trailer(PAGE_KEY, 2**32 - 1),),
    ),
    Decoder(
        "allowed-keys",
        "keys",
        _key_lines,
        (ConfigError,),
        (f"# friends\n{generate_keys().public} decode-0  # the first\n".encode(),),
    ),
)


def family(name: str) -> tuple[Decoder, ...]:
    """The decoders of one family: frames, endpoints, bodies or keys."""
    return tuple(decoder for decoder in DECODERS if decoder.family == name)


def hostile_frames(codec: MessageCodec) -> Iterable[bytes]:
    """Short frames that ask for much memory or much time, and long ones that are nothing but."""
    head = msgpack.packb([1, ME, YOU, 7, 1, 1, [0, []]])[1:]
    for body in (
        b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1 items
        b"\xdf\xff\xff\xff\xff",  # a map of as many
        b"\xdb\xff\xff\xff\xff",  # a text of 4 GiB
        b"\xc6\xff\xff\xff\xff",  # bytes of 4 GiB
        b"\xc9\xff\xff\xff\xff\x01",  # an extension of 4 GiB
        b"\x91" * 100_000,  # 100,000 arrays in each other
        b"\x81\xa1x" * 100_000,
        b"\xdc\x3f\xff" + b"\xc0" * 0x3FFF,
    ):
        yield b"\x98" + head + body
        yield body
    yield bytes(codec.max_frame_bytes)
    yield bytes(codec.max_frame_bytes + 1)
    yield b"\x98" + head + msgpack.packb({"type": "abort", "code": "x" * 65_000, "message": "y" * 65_000})
    yield b"\x98" + head + msgpack.packb({"type": "hello", "node": [[[0] * 1_000] * 1_000] * 1})
