"""A cluster with tokens and keys: who is let in, lists that change while daemons run, and what is never shown."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvbridge.cli.local_cluster import daemon_config, plan_cluster
from kvbridge.control.keys import CurveKeys, generate_keys, write_keys
from kvbridge.core.wire.messages import Heartbeat, Hello, NodeDescription, Rejected, Welcome
from tests.helpers.cluster import Cluster, DaemonProcess, eventually
from tests.helpers.live_rooms import LiveCluster, bearer, ends, frames_refused, http, status
from tests.helpers.raw_peers import RawDecode, RawPrefill

TOKENS = 1000
NODE_TOKEN, BOOTSTRAP_TOKEN = "the-token-of-the-nodes", "the-token-of-bootstrap"
POOLS = {"device": {"full": 16, "swa": 8, "request": 4}}
PUBLIC = {"bind": "tcp://0.0.0.0:0", "advertise": "tcp://127.0.0.1:0"}
"""Where a prefill node listens for all the network to reach."""


@dataclass
class Secure:
    live: LiveCluster
    folder: Path
    server: CurveKeys
    decode: CurveKeys
    bound: CurveKeys = field(default_factory=generate_keys)
    """Allowed as instance `raw` only."""
    loose: CurveKeys = field(default_factory=generate_keys)
    """Allowed as any."""

    @property
    def secrets(self) -> tuple[str, ...]:
        return NODE_TOKEN, BOOTSTRAP_TOKEN, self.server.secret, self.decode.secret

    def allow(self, *entries: str, file: str = "allowed") -> None:
        """Replace a list, as a configuration tool would; `accepted` is the one of the decode node."""
        fresh = self.folder / f"{file}.new"
        fresh.write_text("\n".join(["# who is accepted", *entries, ""]))
        fresh.replace(self.folder / file)

    def allow_all(self, *more: str) -> None:
        self.allow(f"{self.decode.public} decode-0", f"{self.bound.public} raw", self.loose.public, *more)

    def peer(self, keys: CurveKeys) -> RawDecode:
        return RawDecode(self.live.control, keys=keys, server_key=self.server.public)

    def peers(self) -> dict[str, str]:
        return {peer["instance"]: peer["incarnation"] for peer in status(self.live.prefill, self.live.headers)["peers"]}

    def refused(self, reason: str = "unauthenticated") -> float:
        return frames_refused(self.live.prefill, reason, self.live.headers)


@pytest.fixture(scope="module")
def secure() -> Iterator[Secure]:
    folder = Path(tempfile.mkdtemp(prefix="kvb-", dir="/tmp"))
    for name, token in (("node", NODE_TOKEN), ("bootstrap", BOOTSTRAP_TOKEN)):
        (folder / f"{name}.token").write_text(f"{token}\n")
    server, decode = generate_keys(), generate_keys()
    write_keys(server, folder / "prefill.key")
    write_keys(decode, folder / "decode.key")
    node_token, bootstrap_token = ({"token_file": str(folder / f"{name}.token")} for name in ("node", "bootstrap"))

    def settings(role: str, keys_file: str, **control: Any) -> dict[str, Any]:
        curve = {"secret_key_file": str(folder / f"{role}.key"), "allowed_keys_file": str(folder / keys_file)}
        return {
            "http": {"host": "0.0.0.0", "port": 0, "advertise_url": "http://127.0.0.1:0", **node_token},
            "control": {"curve": curve, **control},
            "timeouts": {"control_heartbeat_s": 0.2, "handshake_s": 5.0},
        }

    common: dict[str, Any] = {"model": {"preset": "tiny-v4"}, "transport": "local"}
    decode_pools = {**POOLS, "host": {"pages": 16}}
    planned = plan_cluster(
        folder,
        prefill=daemon_config(**common, instance="prefill-0", pools=POOLS) | settings("prefill", "allowed", **PUBLIC),
        decode=daemon_config(**common, instance="decode-0", pools=decode_pools) | settings("decode", "accepted"),
    )
    cluster = Cluster(planned.folder, planned.bootstrap, planned.prefill, planned.decode)
    live = LiveCluster(cluster, bearer(NODE_TOKEN), bearer(BOOTSTRAP_TOKEN))
    found = Secure(live, folder, server, decode)
    found.allow_all()
    found.allow(file="accepted")
    try:
        bootstrap = cluster.bootstrap
        bootstrap.config |= {"http": {"host": "127.0.0.1", "port": 0, **bootstrap_token}, "daemons": node_token}
        bootstrap.start()
        for daemon in (cluster.prefill, cluster.decode):
            daemon.config["bootstrap"] = {"url": bootstrap.url, "heartbeat_interval_s": 0.5, **bootstrap_token}
            daemon.start()
        cluster.wait_ready()
        yield found
    finally:
        live.detach()
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def _engines_let_go(secure: Secure) -> Iterator[None]:
    """A test that fails half-way must not keep pages from the next ones."""
    yield
    secure.live.detach()


@pytest.fixture
def real(secure: Secure) -> NodeDescription:
    """The decode node as it introduces itself, to a prefill node that is a fake with a key pair of its own."""
    live = secure.live
    with RawPrefill(keys=generate_keys()) as peer:
        body = {"prompt_tokens": TOKENS, "prefill": [{"endpoint": peer.endpoint, "public_key": peer.public_key}]}
        room = http("POST", live.decode, "/v1/requests", json=body, headers=live.headers).json()["room"]
        node = peer.take(Hello).node
        http("DELETE", live.decode, f"/v1/requests/{room}", headers=live.headers)
    return node


@pytest.mark.parametrize("who", ["a stranger", "nobody", "a friend who means another"])
def test_the_unauthenticated_are_refused_and_counted(secure: Secure, who: str) -> None:
    live = secure.live
    before, heard = secure.refused(), secure.refused("malformed")
    if who == "nobody":
        peer = RawDecode(live.control)
    elif who == "a stranger":
        peer = secure.peer(generate_keys())
    else:
        peer = RawDecode(live.control, keys=secure.decode, server_key=generate_keys().public)
    with peer:
        eventually("counted", lambda: secure.refused() > before)
        with contextlib.suppress(zmq.Again):
            peer.socket.send(b"\xc1", zmq.NOBLOCK)
        assert not peer.socket.poll(100)
    assert secure.refused("malformed") == heard, "nothing of it was read"
    live.serves()


def test_a_friend_gets_in(secure: Secure) -> None:
    """The same peer with the right keys: what is refused above is refused for its key alone."""
    live = secure.live
    assert live.address["public_key"] == secure.server.public
    with secure.peer(secure.decode) as peer:
        peer.put(peer.frame(Heartbeat()))
        peer.put(b"\xc1")
        eventually("heard", lambda: secure.refused("malformed"))
    ticket = live.ticket(TOKENS)
    live.cross(TOKENS, ticket["room"])
    assert ticket["prefill"]["http_urls"][0].startswith("http://127.0.0.1:")
    live.serves()


@pytest.mark.parametrize(
    ("key", "code", "text"),
    [("", "config_invalid", "no public key is known of"), (generate_keys().public, "deadline", "timeouts.handshake_s")],
    ids=["no key", "another key"],
)
def test_decode_speaks_to_the_node_that_it_was_told_of_only(secure: Secure, key: str, code: str, text: str) -> None:
    live = secure.live
    body = {"prompt_tokens": TOKENS, "prefill": [live.address | {"public_key": key}]}
    answer = http("POST", live.decode, "/v1/requests", json=body, headers=live.headers)
    assert answer.status_code == 201, answer.text
    assert text in ends(live.decode, int(answer.json()["room"]), "failed", code, live.headers)
    live.serves()


def test_a_key_speaks_for_its_instance_only(secure: Secure, real: NodeDescription) -> None:
    secure.live.cross(TOKENS)
    before = secure.peers()
    room = secure.live.pair(TOKENS)
    with secure.peer(secure.bound) as peer:
        peer.send(peer.introduction(real, instance="decode-0"))
        rejected = peer.take(Rejected)
        assert rejected.code == "unauthorized"
        assert "speaks for instance raw, not for decode-0" in rejected.message
        peer.send(peer.introduction(real, instance="raw"))
        assert peer.take(Welcome)
    assert secure.peers()["decode-0"] == before["decode-0"], "the real node's life did not end"
    secure.live.cross(TOKENS, room)


def test_a_key_that_is_taken_off_the_list_is_out_at_once_and_the_others_stay(secure: Secure, real: NodeDescription):
    room = secure.live.pair(TOKENS)
    with secure.peer(secure.bound) as peer, secure.peer(secure.loose) as other:
        for each, name in ((peer, "raw"), (other, "loose")):
            each.send(each.introduction(real, instance=name))
            each.recipient = each.take(Welcome).incarnation
        secure.allow(f"{secure.decode.public} decode-0", secure.loose.public)
        eventually("it is forgotten", lambda: peer.incarnation not in secure.peers().values())
        before = secure.refused()
        peer.put(peer.frame(Heartbeat(), sequence=0))
        eventually("not heard", lambda: secure.refused() > before)
        assert other.incarnation in secure.peers().values()
    before = secure.refused()
    with secure.peer(secure.bound) as again:
        again.send(again.introduction(real, instance="raw"))
        eventually("denied", lambda: secure.refused() > before)
        assert not again.socket.poll(100)
    secure.allow_all()

    def let_in() -> bool:
        with secure.peer(secure.bound) as back:
            back.send(back.introduction(real, instance="raw"))
            return bool(back.socket.poll(3_000))

    eventually("let in again", let_in)
    secure.live.cross(TOKENS, room)


def test_a_list_that_cannot_be_read_changes_nothing(secure: Secure) -> None:
    secure.allow("no key at all")
    eventually("told", lambda: "allowed_keys_unreadable" in secure.live.prefill.log_path.read_text())
    secure.live.cross(TOKENS)
    secure.allow_all()


def test_a_decode_node_is_written_by_accepted_nodes_only(secure: Secure) -> None:
    """Whoever may admit requests names the prefill node, and its key; with a list the last word is the node's own."""
    live = secure.live
    live.cross(TOKENS)

    def failed(code: str) -> bool:
        path = f"/v1/requests/{live.admit_on_decode(TOKENS)}"
        answer = http("GET", live.decode, f"{path}?wait=15&until=offered", headers=live.headers).json()
        http("DELETE", live.decode, path, headers=live.headers)
        return answer["state"] == "failed" and answer["reason_code"] == code

    def changes() -> int:
        return live.decode.log_path.read_text().count('"allowed_keys_changed"')

    secure.allow(f"{generate_keys().public} prefill-1", file="accepted")
    eventually("the former node refused", lambda: failed("unauthorized"))
    secure.allow(f"{secure.server.public} prefill-1", file="accepted")
    eventually("its key is good for another instance", lambda: failed("peer_failed"))
    secure.allow(f"{secure.server.public} prefill-0", file="accepted")
    eventually("accepted", lambda: not failed("unauthorized") and not failed("peer_failed"))
    live.serves()
    before = changes()
    secure.allow(file="accepted")
    eventually("everybody accepted again, as the next test needs", lambda: changes() > before)


def test_a_node_changes_its_key_without_a_pause(secure: Secure) -> None:
    """Both keys are listed for the instance; the node comes back with the new one, and the old life is over at once."""
    live, fresh = secure.live, generate_keys()
    live.cross(TOKENS)
    old = secure.peers()["decode-0"]
    write_keys(fresh, secure.folder / "fresh.key")
    secure.allow_all(f"{fresh.public} decode-0")
    eventually("noticed", lambda: '"keys": 4' in live.prefill.log_path.read_text())
    live.detach()
    assert live.decode.stop() == 0
    live.decode.config["control"]["curve"]["secret_key_file"] = str(secure.folder / "fresh.key")
    live.decode.start()
    live.decode.wait_ready()
    live.cross(TOKENS)
    assert secure.peers()["decode-0"] != old
    secure.decode = fresh
    secure.allow_all()
    live.cross(TOKENS)


@pytest.mark.parametrize("side", ["prefill", "decode", "bootstrap"])
def test_endpoints_ask_for_their_token(secure: Secure, side: str) -> None:
    live = secure.live
    daemon: DaemonProcess = getattr(live.cluster, side)
    right, wrong = live.headers, live.bootstrap_headers
    if side == "bootstrap":
        right, wrong = wrong, right
    for path in ("/status", "/metrics", "/version", "/openapi.json", "/v1/requests/1"):
        for headers in ({}, wrong, bearer("x"), bearer(NODE_TOKEN[:-1])):
            answer = http("GET", daemon, path, headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized"), (path, headers)
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert http("GET", daemon, path, headers=right).status_code in {200, 404}
    assert http("POST", daemon, "/v1/requests", json={"prompt_tokens": 1}).status_code == 401
    for path in ("/v1/requests/1", "/v1/prefixes"):
        assert http("DELETE", daemon, path).status_code == 401
    for path in ("/health", "/ready"):
        assert http("GET", daemon, path).status_code == 200
    live.serves()


@pytest.mark.thorough
def test_open_endpoints_are_refused_at_the_start(secure: Secure) -> None:
    """All at once, since most of the time goes into importing."""
    live, folder = secure.live, secure.folder
    loose = folder / "loose.key"
    loose.write_text(secure.server.secret)
    loose.chmod(0o644)
    local = {"http": {"port": 0}, "control": {}}
    cases: list[tuple[str, dict[str, Any], str, int]] = [
        ("prefill", local | {"control": PUBLIC}, "control.bind is tcp://0.0.0.0:0, which others can reach", 2),
        ("decode", local | {"http": {"host": "0.0.0.0", "port": 0}}, "http.host is 0.0.0.0, which others can reach", 2),
        ("bootstrap", {"http": {"host": "0.0.0.0", "port": 0}}, "http.host is 0.0.0.0, which others can reach", 2),
        ("prefill", local | {"control": {**PUBLIC, "curve": {"secret_key_file": str(loose)}}}, f"chmod 600 {loose}", 3),
        ("decode", local | {"http": {"port": 0, "token_file": f"{folder}/none"}}, "http.token_file: cannot read", 3),
    ]
    started = []
    for number, (role, change, text, code) in enumerate(cases):
        refused = DaemonProcess(role, f"{role} that is open", folder / f"o{number}")
        if role != "bootstrap":
            refused.config = getattr(live, role).config | {"runtime_dir": str(refused.runtime_dir), "bootstrap": {}}
        refused.config = refused.config | change
        refused.start()
        started.append((refused, text, code))
    trusted = DaemonProcess("prefill", "a daemon on a trusted network", folder / "t")
    trusted.config = live.prefill.config | local | {"control": PUBLIC, "bootstrap": {}}
    trusted.config |= {"runtime_dir": str(trusted.runtime_dir), "instance": "trusted"}
    trusted.arguments = ("--insecure",)
    trusted.start()
    try:
        for refused, text, code in started:
            assert refused.process is not None
            assert refused.process.wait(60) == code, refused.log()
            assert text in refused.log()
            assert "Traceback" not in refused.log()
            assert not any(secret in refused.log() for secret in secure.secrets)
        trusted.wait_ready()
    finally:
        for refused, *_ in started:
            refused.kill()
        code = trusted.stop()
    assert code == 0
    live.serves()
