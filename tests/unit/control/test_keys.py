"""CURVE keys, their files, and the list of allowed keys."""

import asyncio
import errno
import os

import pytest
import zmq
from structlog.testing import capture_logs
from zmq.utils import z85

from kvbridge.control.keys import (
    CurveKeys,
    Gate,
    check_key,
    generate_keys,
    load_keys,
    read_allowed,
    write_keys,
    write_secret,
)
from kvbridge.control.sockets import ZAP_ENDPOINT, Authenticator, SocketContext, bind_error
from kvbridge.core.errors import ConfigError, ConflictError

ONE, TWO, THREE = (generate_keys().public for _ in range(3))


def test_a_secret_is_never_printed():
    keys = generate_keys()
    for text in (repr(keys), str(keys), f"{keys}"):
        assert keys.secret not in text
        assert keys.public in text


@pytest.mark.parametrize("taken", ["node.key", "node.pub"])
def test_no_file_is_overwritten_and_no_link_followed(tmp_path, taken):
    (tmp_path / taken).write_text("what is there")
    with pytest.raises(ConflictError, match="exists"):
        write_keys(generate_keys(), tmp_path / "node.key")
    assert [path.name for path in tmp_path.iterdir()] == [taken]
    assert (tmp_path / taken).read_text() == "what is there"
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConflictError):
        write_secret("s", tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()


def test_the_secret_does_not_go_into_the_file_of_the_public_key(tmp_path):
    with pytest.raises(ConfigError, match="name it otherwise"):
        write_keys(generate_keys(), tmp_path / "node.pub")
    assert not list(tmp_path.iterdir())


def test_a_secret_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "node.key"
    write_keys(generate_keys(), path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=rf"mode 0640; run: chmod 600 {path}"):
        load_keys(path)


@pytest.mark.parametrize("content", [b"", b"x" * 39 + b"\\", b"\xff" * 40, b"a" * 4_000, "absent", "pipe", "folder"])
def test_what_is_no_key_is_refused_by_its_path_without_being_shown(tmp_path, content):
    path = tmp_path / "node.key"
    match content:
        case bytes():
            path.write_bytes(content)
            path.chmod(0o600)
        case "pipe":
            os.mkfifo(path, 0o600)
        case "folder":
            path.mkdir()
    with pytest.raises(ConfigError) as caught:
        load_keys(path)
    assert str(path) in str(caught.value)
    assert "xxx" not in str(caught.value)
    if isinstance(content, str):
        assert any(words in str(caught.value) for words in ("no regular file", "cannot be read"))


def test_halves_of_two_pairs_do_not_fit(tmp_path):
    with pytest.raises(ConfigError, match="give both of one pair"):
        CurveKeys(generate_keys().public, generate_keys().secret)
    write_keys(generate_keys(), tmp_path / "node.key")
    with pytest.raises(ConfigError, match="give both of one pair"):
        load_keys(tmp_path / "node.key", public=generate_keys().public)
    with pytest.raises(ConfigError, match="40 characters"):
        check_key("x", "key")


def test_a_secret_key_among_the_public_ones_is_noticed_and_not_shown(tmp_path):
    keys = generate_keys()
    write_keys(keys, tmp_path / "node.key")
    with pytest.raises(ConfigError, match="own secret key") as caught:
        load_keys(tmp_path / "node.key", allowed=read_allowed([keys.secret], None))
    assert keys.secret not in str(caught.value)


def test_entries_of_both_places_add_up(tmp_path):
    file = tmp_path / "allowed"
    file.write_text(f"# friends\n#\n\n{ONE}\n {TWO}  decode-0  # the first\n{TWO} decode-1\n")
    assert read_allowed([f"{THREE} decode-0"], file) == {
        ONE: frozenset(),
        TWO: frozenset({"decode-0", "decode-1"}),
        THREE: frozenset({"decode-0"}),
    }
    assert read_allowed([], None) == {}


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("nonsense", "40 characters of Z85"),
        ("#comment", "40 characters of Z85"),
        (f"{ONE} decode 0", "at most one instance name"),
        (f"{ONE} ../x", "at most one instance name"),
        (f"{TWO}", "keep one"),
    ],
    ids=["no key", "a comment of its own", "two names", "no name", "twice"],
)
def test_a_wrong_line_is_named(tmp_path, line, text):
    file = tmp_path / "allowed"
    file.write_text(f"{TWO} decode-0\n{line}\n")
    with pytest.raises(ConfigError, match=text) as caught:
        read_allowed([], file)
    assert f"{file} line 2" in str(caught.value)


def test_a_list_that_others_can_write_is_refused(tmp_path):
    file = tmp_path / "allowed"
    file.write_text(ONE)
    file.chmod(0o664)
    with pytest.raises(ConfigError, match="decides who gets in"):
        read_allowed([], file)


def test_a_gate_lets_in_its_own_pair_and_those_on_a_list_that_follows_its_file(tmp_path):
    file, keys = tmp_path / "allowed", generate_keys()
    file.write_text(ONE)
    gate = Gate(keys, [f"{TWO} decode-0"], file)
    assert not gate.follow()
    assert [gate.allows(key) for key in (keys.public, ONE, TWO, THREE, "")] == [True, True, True, False, False]
    assert (gate.names_of(TWO), gate.names_of(keys.public)) == ({"decode-0"}, frozenset())
    file.write_text(f"{ONE}\n{THREE}\n")
    assert gate.follow()
    assert set(gate.allowed) == {ONE, TWO, THREE}
    for content in ("nonsense", None):
        file.write_text(content) if content else file.unlink()
        with capture_logs() as lines:
            assert [gate.follow(), gate.follow()] == [False, False]
        assert [line["event"] for line in lines] == ["allowed_keys_unreadable"], "told once"
        assert set(gate.allowed) == {ONE, TWO, THREE}, "a list that cannot be read changes nothing"
    file.write_text(f"{THREE} x\n")
    assert gate.follow()
    assert gate.allowed == {TWO: frozenset({"decode-0"}), THREE: frozenset({"x"})}
    assert [Gate(None).allows(key) for key in ("", ONE)] == [True, False]
    assert Gate(generate_keys([ONE])).allows(ONE)


async def test_a_handshake_passes_with_an_allowed_key_and_everything_else_is_answered_with_a_refusal():
    context, denied = SocketContext(), []
    authenticator = Authenticator(context, Gate(generate_keys([ONE])), denied.append)
    asker = context.open(zmq.REQ)
    asker.connect(ZAP_ENDPOINT)
    asked = [b"1.0", b"7", b"kvbridge", b"10.0.0.9", b"", b"CURVE"]

    async def answer(*parts: bytes) -> list[bytes]:
        asker.send_multipart(parts)
        async with asyncio.timeout(20):
            while not asker.poll(0):  # noqa: ASYNC110 - ZeroMQ wakes nobody here
                await asyncio.sleep(0.001)
        return asker.recv_multipart()

    assert await answer(*asked, z85.decode(ONE)) == [b"1.0", b"7", b"200", b"", ONE.encode(), b""]
    for parts in ((*asked, z85.decode(TWO)), (*asked, z85.decode(ONE), b"more"), asked, (*asked[:5], b"PLAIN", b"")):
        assert (await answer(*parts))[:4] == [b"1.0", b"7", b"400", b"key not allowed"]
    assert [TWO in denied[0], len(denied)] == [True, 4]
    asker.close()
    authenticator.close()
    context.close()


def test_a_failed_bind_says_what_to_do():
    assert isinstance(bind_error("tcp://127.0.0.1:1", errno.EADDRINUSE, "x"), ConflictError)
    assert "127.0.0.1:1 is taken; stop" in str(bind_error("tcp://127.0.0.1:1", errno.EADDRINUSE, "x"))
    assert "no such address" in str(bind_error("tcp://10.0.0.9:1", errno.EADDRNOTAVAIL, "x"))
    assert "above 1023" in str(bind_error("tcp://127.0.0.1:1", errno.EACCES, "x"))
    assert "odd" in str(bind_error("tcp://127.0.0.1:1", errno.EIO, "odd"))
