"""A cluster with keys and tokens on every endpoint, on all interfaces: who gets in, who does not, what is never shown."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zmq
from typer.testing import CliRunner

from kvbridge.cli.local_cluster import ClusterSpec, NodeSpec, plan_cluster
from kvbridge.cli.main import app
from kvbridge.control.keys import CurveKeys, generate_keys, write_keys
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.geometry.presets import preset
from kvbridge.core.wire.messages import Heartbeat
from tests.helpers.cluster import Cluster, DaemonProcess, eventually
from tests.helpers.live_rooms import LiveCluster, bearer, ends, frames_refused, http, report, status
from tests.helpers.raw_peers import RawDecode

TOKENS = 1000
NODE_TOKEN, BOOTSTRAP_TOKEN = "the-token-of-the-nodes", "the-token-of-bootstrap"
POOLS = {"device": {"full": 16, "swa": 8, "request": 4}}
PUBLIC = {"bind": "tcp://0.0.0.0:0", "advertise": "tcp://127.0.0.1:0"}
"""Where a prefill node listens for all the network to reach."""


@dataclass
class Secure:
    """A secured cluster and its secrets."""

    live: LiveCluster
    prefill_keys: CurveKeys
    decode_keys: CurveKeys

    @property
    def secrets(self) -> tuple[str, ...]:
        return NODE_TOKEN, BOOTSTRAP_TOKEN, self.prefill_keys.secret, self.decode_keys.secret


@pytest.fixture(autouse=True)
def _engines_let_go(secure: Secure) -> Iterator[None]:
    """A test that fails half-way must not keep pages from the next ones."""
    yield
    secure.live.detach()


@pytest.fixture(scope="module")
def secure() -> Iterator[Secure]:
    folder = Path(tempfile.mkdtemp(prefix="kvb-", dir="/tmp"))
    node_token, bootstrap_token = folder / "node.token", folder / "bootstrap.token"
    node_token.write_text(NODE_TOKEN + "\n")
    bootstrap_token.write_text(BOOTSTRAP_TOKEN + "\n")
    decode_keys = generate_keys()
    prefill_keys = generate_keys([decode_keys.public])
    write_keys(prefill_keys, folder / "prefill.key")
    write_keys(decode_keys, folder / "decode.key")

    def endpoints(name: str, **curve: Any) -> dict[str, Any]:
        return {
            "http": {
                "host": "0.0.0.0",
                "port": 0,
                "advertise_url": "http://127.0.0.1:0",
                "token_file": str(node_token),
            },
            "control": (PUBLIC if name == "prefill" else {})
            | {"curve": {"secret_key_file": str(folder / f"{name}.key"), **curve}},
            "timeouts": {"handshake_s": 5.0},
        }

    spec = ClusterSpec(
        model={"preset": "tiny-v4"},
        transport="local",
        prefill=NodeSpec(
            instance="prefill-0", pools=POOLS, more=endpoints("prefill", allowed_public_keys=[decode_keys.public])
        ),
        decode=NodeSpec(instance="decode-0", pools={**POOLS, "host": {"pages": 16}}, more=endpoints("decode")),
    )
    planned = plan_cluster(folder, spec)
    cluster = Cluster(planned.folder, planned.bootstrap, planned.prefill, planned.decode)
    live = LiveCluster(cluster, bearer(NODE_TOKEN), bearer(BOOTSTRAP_TOKEN))
    try:
        bootstrap = cluster.bootstrap
        bootstrap.config |= {
            "http": {"host": "127.0.0.1", "port": 0, "token_file": str(bootstrap_token)},
            "daemons": {"token_file": str(node_token)},
        }
        bootstrap.start()
        link = {"url": bootstrap.url, "heartbeat_interval_s": 0.5, "token_file": str(bootstrap_token)}
        for daemon in (cluster.prefill, cluster.decode):
            daemon.config["bootstrap"] = link
            daemon.start()
        cluster.wait_ready()
        yield Secure(live, prefill_keys, decode_keys)
    finally:
        live.detach()
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


def test_a_room_crosses(secure: Secure) -> None:
    live = secure.live
    ticket = live.ticket(TOKENS)
    live.cross(TOKENS, ticket["room"])
    # Other tests name other keys at the same address: nobody is met there.
    assert [peer["node"] for peer in status(live.decode, live.headers)["peers"] if peer["node"]] == ["prefill-0/node-0"]
    assert ticket["prefill"]["http_urls"][0].startswith("http://127.0.0.1:")
    live.serves()


# ------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize("who", ["a stranger", "nobody", "a friend who means another"])
def test_the_unauthenticated_are_refused_and_counted(secure: Secure, who: str) -> None:
    live = secure.live
    before = frames_refused(live.prefill, "unauthenticated", live.headers)
    heard = frames_refused(live.prefill, "malformed", live.headers)
    if who == "nobody":
        peer = RawDecode(live.control)
    elif who == "a stranger":
        peer = RawDecode(live.control, keys=generate_keys(), server_key=secure.prefill_keys.public)
    else:
        peer = RawDecode(live.control, keys=secure.decode_keys, server_key=generate_keys().public)
    with peer:
        eventually("counted", lambda: frames_refused(live.prefill, "unauthenticated", live.headers) > before)
        with contextlib.suppress(zmq.Again):
            peer.socket.send(b"\xc1", zmq.NOBLOCK)
        assert not peer.socket.poll(100)
    assert frames_refused(live.prefill, "malformed", live.headers) == heard, "nothing of it was read"
    live.serves()


def test_a_friend_gets_in(secure: Secure) -> None:
    """The same peer with the right keys: what is refused above is refused for its key alone."""
    assert secure.live.address["public_key"] == secure.prefill_keys.public
    with RawDecode(secure.live.control, keys=secure.decode_keys, server_key=secure.prefill_keys.public) as peer:
        peer.put(peer.frame(Heartbeat()))
        peer.put(b"\xc1")
        eventually("heard", lambda: frames_refused(secure.live.prefill, "malformed", secure.live.headers))
    secure.live.serves()


@pytest.mark.parametrize(
    ("key", "code", "text"),
    [
        ("", "config_invalid", "no public key is known of"),
        (generate_keys().public, "deadline", "timeouts.handshake_s"),
    ],
    ids=["no key", "another key"],
)
def test_decode_speaks_to_the_node_that_it_was_told_of_only(secure: Secure, key: str, code: str, text: str) -> None:
    live = secure.live
    body = {"prompt_tokens": TOKENS, "prefill": [live.address | {"public_key": key}]}
    answer = http("POST", live.decode, "/v1/requests", json=body, headers=live.headers)
    assert answer.status_code == 201, answer.text
    assert text in ends(live.decode, int(answer.json()["room"]), "failed", code, live.headers)
    live.serves()


# ------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("side", ["prefill", "decode", "bootstrap"])
def test_endpoints_ask_for_their_token(secure: Secure, side: str) -> None:
    live = secure.live
    daemon: DaemonProcess = getattr(live.cluster, side)
    right = live.bootstrap_headers if side == "bootstrap" else live.headers
    wrong = live.headers if side == "bootstrap" else live.bootstrap_headers
    for path in ("/status", "/metrics", "/version", "/openapi.json", "/v1/requests/1"):
        for headers in ({}, wrong, bearer("x"), bearer(NODE_TOKEN[:-1])):
            answer = http("GET", daemon, path, headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized"), (path, headers)
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert http("GET", daemon, path, headers=right).status_code in {200, 404}
    assert http("POST", daemon, "/v1/requests", json={"prompt_tokens": 1}).status_code == 401
    assert http("DELETE", daemon, "/v1/prefixes").status_code == 401
    for path in ("/health", "/ready"):
        assert http("GET", daemon, path).status_code == 200
    live.serves()


def test_a_bootstrap_with_the_wrong_token_says_whose_mistake_it_is(secure: Secure) -> None:
    live = secure.live
    other = DaemonProcess("bootstrap", "a bootstrap with a wrong token", live.cluster.folder / "w")
    other.config = {"http": {"port": 0}, "daemons": {"token": "wrong"}}
    other.arguments = ("--endpoint-dir", str(other.runtime_dir))
    other.start()
    try:
        for daemon in (live.prefill, live.decode):
            entry = registration(daemon)
            path = f"/v1/instances/{entry['instance']}/nodes/{entry['node']}"
            answer = http("PUT", other, path, json=entry)
            assert answer.status_code == 200, answer.text
        answer = http("POST", other, "/v1/requests", json={"prompt_tokens": TOKENS})
        assert (answer.status_code, answer.json()["code"]) == (503, "not_ready")
        assert "daemons.token_file" in answer.json()["detail"]
    finally:
        assert other.stop() == 0
    live.serves()


def registration(daemon: DaemonProcess) -> dict[str, Any]:
    """What a daemon tells bootstrap of itself, put together from outside."""
    endpoint = daemon.endpoint()
    control = endpoint.control.model_dump() if endpoint.control else {"endpoint": "ipc:///dev/null"}
    geometry = preset("tiny-v4")
    return {
        "instance": endpoint.instance,
        "node": endpoint.node,
        "role": endpoint.role,
        "incarnation": endpoint.incarnation,
        "http_url": daemon.url.replace("0.0.0.0", "127.0.0.1"),
        "control": control,
        "meets_by": ["curve"],
        "pp_size": 1,
        "tp_size": 1,
        "ranks": [{"pp": 0, "tp": 0}],
        "fingerprint": fingerprint(geometry),
        "geometry": geometry.model_dump(mode="json"),
    }


# ------------------------------------------------------------------------------------------- what is never shown


def test_secrets_are_nowhere_to_be_seen(secure: Secure) -> None:
    live = secure.live
    shown = {}
    for daemon in live.cluster.all():
        headers = live.bootstrap_headers if daemon is live.cluster.bootstrap else live.headers
        shown[f"log of {daemon.name}"] = daemon.log_path.read_text()
        for path in ("/status", "/metrics", "/ready", "/openapi.json"):
            shown[f"{path} of {daemon.name}"] = http("GET", daemon, path, headers=headers).text
        arguments = ["config", "show", "--role", daemon.role, "--config", str(daemon.folder / "config.yaml")]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        shown[f"config show of {daemon.name}"] = result.output
        if daemon.runtime_dir.exists():
            shown[f"endpoint file of {daemon.name}"] = (daemon.runtime_dir / "daemon.json").read_text()
    shown["instances"] = http("GET", live.cluster.bootstrap, "/v1/instances", headers=live.bootstrap_headers).text
    for where, text in shown.items():
        assert text, where
        for secret in secure.secrets:
            assert secret not in text, f"a secret shows in {where}"


def test_a_token_in_the_file_itself_is_blanked(secure: Secure, tmp_path: Path) -> None:
    file = tmp_path / "bootstrap.yaml"
    file.write_text("http: {token: a-token-in-the-file}\ndaemons: {token: another-one}\n")
    result = CliRunner().invoke(app, ["config", "show", "--role", "bootstrap", "--config", str(file)])
    assert result.exit_code == 0
    assert "a-token-in-the-file" not in result.output
    assert "another-one" not in result.output
    file.write_text("http: {token: a-token-in-the-file, token_file: /x, port: nonsense}\n")
    result = CliRunner().invoke(app, ["config", "show", "--role", "bootstrap", "--config", str(file)])
    assert result.exit_code == 2
    assert "a-token-in-the-file" not in result.output


# ------------------------------------------------------------------------------------------- starts


@pytest.mark.thorough
def test_open_endpoints_are_refused_at_the_start(secure: Secure) -> None:
    """All at once, since most of the time goes into importing."""
    live, folder = secure.live, secure.live.cluster.folder
    loose, broken = folder / "loose.key", folder / "broken.key"
    for path, text, mode in ((loose, secure.prefill_keys.secret, 0o644), (broken, "k" * 39, 0o600)):
        path.write_text(text)
        path.chmod(mode)
    local = {"http": {"port": 0}, "control": {}}
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("prefill", local | {"control": PUBLIC}, "control.bind is tcp://0.0.0.0:0, which others can reach"),
        ("decode", local | {"http": {"host": "0.0.0.0", "port": 0}}, "http.host is 0.0.0.0, which others can reach"),
        ("bootstrap", {"http": {"host": "0.0.0.0", "port": 0}}, "http.host is 0.0.0.0, which others can reach"),
        ("prefill", local | {"control": {**PUBLIC, "curve": {"secret_key_file": str(broken)}}}, "got 39 characters"),
    ]
    unfit: list[tuple[str, dict[str, Any], str]] = [
        ("prefill", local | {"control": {**PUBLIC, "curve": {"secret_key_file": str(loose)}}}, f"chmod 600 {loose}"),
        ("decode", local | {"http": {"port": 0, "token_file": str(folder / "none")}}, "http.token_file: cannot read"),
        (
            "prefill",
            local | {"bootstrap": {"url": "http://127.0.0.1:1", "token_file": str(folder / "none")}},
            "bootstrap.token_file: cannot read",
        ),
    ]
    started = []
    cases = [(*case, 2) for case in wrong] + [(*case, 3) for case in unfit]
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


def test_the_room_of_a_ticket_is_asked_for_with_the_token(secure: Secure) -> None:
    live = secure.live
    room = int(live.ticket(TOKENS)["room"])
    for side in (live.prefill, live.decode):
        assert http("DELETE", side, f"/v1/requests/{room}").status_code == 401
        assert report(side, room, live.headers)["state"] in {"admitted", "offered", "transferring"}
    answer = http("DELETE", live.cluster.bootstrap, f"/v1/requests/{room}", headers=live.bootstrap_headers)
    assert answer.status_code == 200
    ends(live.decode, room, "aborted", "aborted", live.headers)
    live.serves()
