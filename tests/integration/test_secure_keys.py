"""Keys bound to instances, names that nobody takes over, and a list of allowed keys that changes while daemons run."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvbridge.cli.local_cluster import ClusterSpec, NodeSpec, plan_cluster
from kvbridge.control.keys import CurveKeys, generate_keys, write_keys
from kvbridge.core.wire.messages import Heartbeat, Hello, NodeDescription, Rejected, Welcome
from tests.helpers.cluster import Cluster, eventually
from tests.helpers.live_rooms import LiveCluster, frames_refused, http, report, status
from tests.helpers.raw_peers import RawDecode, RawPrefill

TOKENS = 600
POOLS = {"device": {"full": 16, "swa": 8, "request": 4}}
HEARTBEAT_S = 0.2


@dataclass
class Keyed:
    """A cluster whose prefill node lets in who is in a file, and the keys in it."""

    live: LiveCluster
    server: CurveKeys
    allowed_file: Path
    decode: CurveKeys
    bound: CurveKeys = field(default_factory=generate_keys)
    """Allowed as instance `raw` only."""
    loose: CurveKeys = field(default_factory=generate_keys)
    """Allowed as any."""

    def allow(self, *entries: str, file: Path | None = None) -> None:
        """Replace a file, as a configuration tool would."""
        file = file or self.allowed_file
        fresh = file.with_suffix(".new")
        fresh.write_text("\n".join(["# who is accepted", *entries, ""]))
        fresh.replace(file)

    @property
    def accepted_file(self) -> Path:
        """The list of the decode node: whom it lets write its memory."""
        return self.allowed_file.with_name("accepted")

    def allow_all(self, *more: str) -> None:
        self.allow(f"{self.decode.public} decode-0", f"{self.bound.public} raw", self.loose.public, *more)

    def peer(self, keys: CurveKeys) -> RawDecode:
        return RawDecode(self.live.control, keys=keys, server_key=self.server.public)

    def peers(self) -> dict[str, str]:
        """Incarnations that prefill knows, by instance."""
        return {peer["instance"]: peer["incarnation"] for peer in status(self.live.prefill)["peers"]}


@pytest.fixture(scope="module")
def keyed() -> Iterator[Keyed]:
    folder = Path(tempfile.mkdtemp(prefix="kvb-", dir="/tmp"))
    server, decode = generate_keys(), generate_keys()
    write_keys(server, folder / "prefill.key")
    write_keys(decode, folder / "decode.key")
    timeouts = {"control_heartbeat_s": HEARTBEAT_S, "handshake_s": 6.0}
    curve = {"secret_key_file": str(folder / "prefill.key"), "allowed_keys_file": str(folder / "allowed")}
    spec = ClusterSpec(
        model={"preset": "tiny-v4"},
        transport="local",
        prefill=NodeSpec(
            instance="prefill-0",
            pools=POOLS,
            more={"control": {"curve": curve}, "timeouts": timeouts},
        ),
        decode=NodeSpec(
            instance="decode-0",
            pools={**POOLS, "host": {"pages": 16}},
            more={
                "control": {
                    "curve": {
                        "secret_key_file": str(folder / "decode.key"),
                        "allowed_keys_file": str(folder / "accepted"),
                    }
                },
                "timeouts": timeouts,
            },
        ),
    )
    planned = plan_cluster(folder, spec)
    cluster = Cluster(planned.folder, planned.bootstrap, planned.prefill, planned.decode)
    live = LiveCluster(cluster)
    found = Keyed(live, server, folder / "allowed", decode)
    try:
        found.allow_all()
        found.allow(file=found.accepted_file)
        cluster.start()
        cluster.wait_ready()
        yield found
    finally:
        live.detach()
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def real(keyed: Keyed) -> NodeDescription:
    """The decode node as it introduces itself, to a prefill node that is a fake with a key pair of its own."""
    with RawPrefill(keys=generate_keys()) as peer:
        address = {"endpoint": peer.endpoint, "public_key": peer.public_key}
        body = {"prompt_tokens": TOKENS, "prefill": [address]}
        room = http("POST", keyed.live.decode, "/v1/requests", json=body).json()["room"]
        node = peer.take(Hello).node
        http("DELETE", keyed.live.decode, f"/v1/requests/{room}")
    return node


def test_a_key_speaks_for_its_instance_only(keyed: Keyed, real: NodeDescription) -> None:
    keyed.live.cross(TOKENS)
    before = keyed.peers()
    room = keyed.live.pair(TOKENS)
    with keyed.peer(keyed.bound) as peer:
        peer.send(peer.introduction(real, instance="decode-0"))
        rejected = peer.take(Rejected)
        assert rejected.code == "unauthorized"
        assert "speaks for instance raw, not for decode-0" in rejected.message
        peer.send(peer.introduction(real, instance="raw"))
        assert peer.take(Welcome)
    assert keyed.peers()["decode-0"] == before["decode-0"], "the real node's life did not end"
    keyed.live.cross(TOKENS, room)


def test_nobody_takes_a_name_over(keyed: Keyed, real: NodeDescription) -> None:
    """A new life of a node ends the old one's rooms, so it needs the old one's key."""
    room = keyed.live.pair(TOKENS)
    under_way = {"offered", "transferring"}
    eventually("met, and offered", lambda: report(keyed.live.prefill, room)["state"] in under_way)
    before = keyed.peers()
    with keyed.peer(keyed.loose) as peer:
        peer.send(peer.introduction(real, instance="decode-0", node="node-0"))
        rejected = peer.take(Rejected)
        assert rejected.code == "unauthorized"
        assert "known here under another key" in rejected.message
        peer.send(peer.introduction(real, instance="decode-1"))
        assert peer.take(Welcome)
    assert keyed.peers()["decode-0"] == before["decode-0"]
    assert report(keyed.live.prefill, room)["state"] in under_way
    keyed.live.cross(TOKENS, room)


def test_a_key_that_is_taken_off_the_list_is_out_at_once_and_the_others_stay(
    keyed: Keyed, real: NodeDescription
) -> None:
    room = keyed.live.pair(TOKENS)
    with keyed.peer(keyed.bound) as peer, keyed.peer(keyed.loose) as other:
        for each in (peer, other):
            each.send(each.introduction(real, instance="raw" if each is peer else "loose"))
            each.recipient = each.take(Welcome).incarnation
        keyed.allow(f"{keyed.decode.public} decode-0", keyed.loose.public)
        eventually("it is forgotten", lambda: peer.incarnation not in keyed.peers().values())
        refused = frames_refused(keyed.live.prefill, "unauthenticated")
        peer.put(peer.frame(Heartbeat(), sequence=0))
        eventually("not heard", lambda: frames_refused(keyed.live.prefill, "unauthenticated") > refused)
        assert other.incarnation in keyed.peers().values()
    denied = frames_refused(keyed.live.prefill, "unauthenticated")
    with keyed.peer(keyed.bound) as again:
        again.send(again.introduction(real, instance="raw"))
        eventually("denied", lambda: frames_refused(keyed.live.prefill, "unauthenticated") > denied)
        assert not again.socket.poll(100)
    keyed.allow_all()

    def let_in() -> bool:
        with keyed.peer(keyed.bound) as back:
            back.send(back.introduction(real, instance="raw"))
            return bool(back.socket.poll(3_000))

    eventually("let in again", let_in)
    keyed.live.cross(TOKENS, room)


def test_a_list_that_cannot_be_read_changes_nothing(keyed: Keyed) -> None:
    keyed.allow("no key at all")
    eventually("told", lambda: "allowed_keys_unreadable" in keyed.live.prefill.log_path.read_text())
    keyed.live.cross(TOKENS)
    keyed.allow_all()


def test_a_decode_node_is_written_by_accepted_nodes_only(keyed: Keyed) -> None:
    """Whoever may admit requests names the prefill node, and its key; with a list the last word is the node's own."""
    live = keyed.live
    live.cross(TOKENS)

    def failed(code: str) -> bool:
        room = live.admit_on_decode(TOKENS)
        answer = http("GET", live.decode, f"/v1/requests/{room}?wait=15&until=offered").json()
        http("DELETE", live.decode, f"/v1/requests/{room}")
        return answer["state"] == "failed" and answer["reason_code"] == code

    keyed.allow(f"{generate_keys().public} prefill-1", file=keyed.accepted_file)
    eventually("the former node refused", lambda: failed("unauthorized"))
    keyed.allow(f"{keyed.server.public} prefill-1", file=keyed.accepted_file)
    eventually("its key is good for another instance", lambda: failed("peer_failed"))
    keyed.allow(f"{keyed.server.public} prefill-0", file=keyed.accepted_file)
    eventually("accepted", lambda: not failed("unauthorized") and not failed("peer_failed"))
    live.serves()

    def changes() -> int:
        return live.decode.log_path.read_text().count('"allowed_keys_changed"')

    before = changes()
    keyed.allow(file=keyed.accepted_file)
    eventually("everybody accepted again, as the next test needs", lambda: changes() > before)


def test_a_node_changes_its_key_without_a_pause(keyed: Keyed) -> None:
    """Both keys are listed for the instance; the node comes back with the new one, and the old life is over at once."""
    live, fresh = keyed.live, generate_keys()
    live.cross(TOKENS)
    old = keyed.peers()["decode-0"]
    write_keys(fresh, live.cluster.folder / "fresh.key")
    keyed.allow_all(f"{fresh.public} decode-0")
    eventually("noticed", lambda: '"keys": 4' in live.prefill.log_path.read_text())
    live.detach()
    assert live.decode.stop() == 0
    live.decode.config["control"]["curve"]["secret_key_file"] = str(live.cluster.folder / "fresh.key")
    live.decode.start()
    live.decode.wait_ready()
    live.cross(TOKENS)
    assert keyed.peers()["decode-0"] != old
    keyed.decode = fresh
    keyed.allow_all()
    live.cross(TOKENS)
