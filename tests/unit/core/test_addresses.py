"""Endpoints as people write them."""

import pytest

from kvbridge.core.addresses import TcpAddress, is_loopback, parse_tcp
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
