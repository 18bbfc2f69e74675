"""Endpoints as people write them."""

import re

import pytest

from kvbridge.core.addresses import HTTP_URL, SERVER_URL, TcpAddress, is_loopback, parse_tcp
from kvbridge.core.errors import ConfigError


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("tcp://127.0.0.1:0", TcpAddress("127.0.0.1", 0)),
        ("tcp://node-7.rack:65535", TcpAddress("node-7.rack", 65_535)),
        ("tcp://[fe80::1%eth0]:80", TcpAddress("fe80::1%eth0", 80)),
        ("tcp://*:80", TcpAddress("*", 80)),
        ("ipc:///run/kvbridge/peers.sock", None),
    ],
)
def test_parts(endpoint, address):
    assert parse_tcp(endpoint) == address


@pytest.mark.parametrize(
    "endpoint", ["", "tcp://", "tcp://host", "tcp://host:", "tcp://host:65536", "tcp://::1:80", "udp://h:1", "ipc://x"]
)
def test_what_is_no_endpoint_is_refused(endpoint):
    with pytest.raises(ConfigError):
        parse_tcp(endpoint)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("[::1]", True),
        ("::ffff:127.0.0.1", True),
        ("*", False),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example", False),
    ],
)
def test_loopback(host, loopback):
    assert is_loopback(host) is loopback


@pytest.mark.parametrize(
    ("url", "is_server", "has_path"),
    [
        ("http://10.0.0.7:7901", True, True),
        ("https://node-7.rack_2.example.", True, True),
        ("http://[fe80::1]:0", True, True),
        ("http://node-7:65535", True, True),
        ("http://node-7/v1?a=b", False, True),
        ("http://node-7:65536", False, False),
        ("http://node-7:99999999", False, False),
        ("http://a..b", False, False),
        (f"http://{'a' * 64}", False, False),
        ("http://b\u00fccher", False, False),
        ("http://node-7/\u00e9", False, False),
        ("http://user@node-7", False, False),
        ("http://node 7", False, False),
        ("http://", False, False),
        ("ftp://node-7", False, False),
    ],
)
def test_what_a_client_can_ask(url, is_server, has_path):
    assert bool(re.fullmatch(SERVER_URL, url)) is is_server
    assert bool(re.fullmatch(HTTP_URL, url)) is has_path
