"""Tokens and certificates of running daemons are changed in their files: no restart, and nobody is refused meanwhile."""

import socket
import ssl
import subprocess
import tempfile
from pathlib import Path

import httpx
import pytest

from kvbridge.cli.local_cluster import LOG_JSON, DaemonProcess
from kvbridge.processes import stop_all
from tests.helpers.cluster import cluster, eventually
from tests.helpers.live_rooms import bearer, http, live_cluster
from tests.helpers.redis_server import redis_server

pytestmark = pytest.mark.thorough


def write(file: Path, *lines: str) -> None:
    """Change a file as Kubernetes does: another file takes its name."""
    draft = file.with_suffix(".new")
    draft.write_text("".join(f"{line}\n" for line in lines))
    draft.rename(file)


def test_tokens_are_changed_while_daemons_work():
    folder = Path(tempfile.mkdtemp(prefix="kvb-", dir="/tmp"))
    nodes_taken, nodes_shown = folder / "nodes.taken", folder / "nodes.shown"
    bootstrap_taken, bootstrap_shown = folder / "bootstrap.taken", folder / "bootstrap.shown"
    for file, token in ((nodes_taken, "n-1"), (nodes_shown, "n-1"), (bootstrap_taken, "b-1"), (bootstrap_shown, "b-1")):
        write(file, token)
    node = {
        "http": {"port": 0, "token_file": str(nodes_taken)},
        "bootstrap": {"token_file": str(bootstrap_shown), "heartbeat_interval_s": 0.3},
    }
    shared = {
        "http": {"port": 0, "token_file": str(bootstrap_taken)},
        "daemons": {"token_file": str(nodes_shown)},
        "directory": {"expire_after_s": 5},
    }
    with cluster({"preset": "tiny-v4"}, bootstrap=shared, prefill=node, decode=node, wait=False) as made:
        for daemon in (made.prefill, made.decode):
            daemon.kill()
            daemon.config["bootstrap"] |= {"url": made.bootstrap.url}
            daemon.start()

        def pairs(token: str) -> bool:
            answer = http("POST", made.bootstrap, "/v1/requests", json={"prompt_tokens": 100}, headers=bearer(token))
            if answer.status_code != 201:
                return False
            path = f"/v1/requests/{answer.json()['room']}"
            return http("DELETE", made.bootstrap, path, headers=bearer(token)).is_success

        def refused(daemon: DaemonProcess, token: str) -> bool:
            return http("GET", daemon, "/status", headers=bearer(token)).status_code == 401

        eventually("a pair", lambda: pairs("b-1"), 60)
        write(nodes_taken, "n-2", "n-1")
        write(bootstrap_taken, "b-2", "b-1")
        for daemon, token in ((made.prefill, "n-2"), (made.decode, "n-2"), (made.bootstrap, "b-2")):
            eventually("the new token is good", lambda daemon=daemon, token=token: not refused(daemon, token))
        assert pairs("b-1")
        write(nodes_shown, "n-2")
        write(bootstrap_shown, "b-2")
        eventually("both files", lambda: all(each.log(500).count("secret_changed") == 2 for each in made.all()))
        write(nodes_taken, "n-2")
        write(bootstrap_taken, "b-2")
        for daemon, token in ((made.prefill, "n-1"), (made.decode, "n-1"), (made.bootstrap, "b-1")):
            eventually("the former token is refused", lambda daemon=daemon, token=token: refused(daemon, token))
        assert pairs("b-2")  # and bootstrap shows the nodes theirs
        write(bootstrap_shown)  # a mistake: the former one stays in force
        eventually("the mistake is told", lambda: "secret_unreadable" in made.prefill.log(500))
        with httpx.Client(trust_env=False) as client:
            for _ in range(3):
                listing = client.get(f"{made.bootstrap.url}/v1/instances", headers=bearer("b-2")).json()
                assert {each["instance"] for each in listing} == {"prefill-0", "decode-0"}
        assert pairs("b-2")


def test_the_password_of_redis_is_changed_while_rooms_are_paired():
    with redis_server(password="first") as server:
        password = server.socket.parent / "password"
        write(password, "first")
        directory = {"store": "redis", "redis_url": server.url, "redis_password_file": str(password)}
        with live_cluster(bootstrap={"directory": directory}) as live, server.client() as operator:
            bootstrap = live.cluster.bootstrap
            room = live.ticket(600)["room"]
            operator.execute_command("ACL", "SETUSER", "default", ">second")
            write(password, "second")
            eventually("read", lambda: "secret_changed" in bootstrap.log(500))
            operator.execute_command("ACL", "SETUSER", "default", "<first")
            operator.client_kill_filter(_type="normal", skipme=True)  # every connection has to be made anew
            other = live.ticket(600)["room"]
            live.cross(600, room)
            live.cross(600, other)
            assert http("GET", bootstrap, "/ready").is_success
            shown = bootstrap.log(5_000) + http("GET", bootstrap, "/status").text
            assert "WRONGPASS" not in shown
            assert "second" not in shown.replace("seconds", "")


def certificate(folder: Path, name: str) -> tuple[str, str]:
    key, chain = folder / "draft.key", folder / "draft.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(chain)], check=True, capture_output=True, timeout=60)
    return chain.read_text().strip(), key.read_text().strip()


def test_a_certificate_is_changed_while_a_daemon_serves(tmp_path: Path):
    folder = Path(tempfile.mkdtemp(prefix="kvb-", dir="/tmp"))
    chain, key = folder / "tls.pem", folder / "tls.key"
    first, second = certificate(folder, "first"), certificate(folder, "second")
    write(chain, first[0])
    write(key, first[1])
    tls = {"tls_certificate_file": str(chain), "tls_key_file": str(key)}
    daemon = DaemonProcess("bootstrap", "bootstrap", folder / "b", {"http": {"port": 0, **tls}, **LOG_JSON})
    daemon.arguments = ("--endpoint-dir", str(daemon.runtime_dir))
    daemon.start()
    try:
        port = int(daemon.url.rpartition(":")[2])

        def shown() -> str:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            with socket.create_connection(("127.0.0.1", port), 5) as plain, context.wrap_socket(plain) as wrapped:
                return ssl.DER_cert_to_PEM_cert(wrapped.getpeercert(binary_form=True)).strip()

        assert shown() == first[0]
        write(key, second[1])  # without its certificate it is of no use yet
        eventually("the mismatch is told", lambda: "secret_unreadable" in daemon.log(100))
        assert shown() == first[0]
        write(chain, second[0])
        eventually("the new certificate is shown", lambda: shown() == second[0])
    finally:
        stop_all([daemon], timeout_s=20)
