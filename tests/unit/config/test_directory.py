"""The store of the directory: what fits together, and that its secrets are not shown."""

from __future__ import annotations

import pytest

from kvbridge.config.loading import load_config, render_config
from kvbridge.config.schema import BootstrapConfig
from kvbridge.core.errors import ConfigError


def load(**directory) -> BootstrapConfig:
    flags = {f"directory.{key}": value for key, value in directory.items()}
    return load_config(BootstrapConfig, environment={}, flags=flags)


@pytest.mark.parametrize(
    "directory",
    [
        {},
        {"store": "redis", "redis_url": "redis://localhost:6379/0"},
        {"store": "redis", "redis_url": "redis://127.0.0.1"},
        {"store": "redis", "redis_url": "unix:///run/redis.sock", "namespace": "cluster-1:kv"},
        {"store": "redis", "redis_url": "rediss://user:hush@redis.example:6380/2?ssl_ca_certs=/etc/ca.pem"},
        {"store": "redis", "redis_url": "redis://redis.example", "redis_password_file": "/run/secrets/redis"},
    ],
    ids=str,
)
def test_a_sound_store_is_accepted(directory):
    load(**directory)


@pytest.mark.parametrize(
    ("directory", "expected"),
    [
        ({"store": "etcd"}, "directory.store"),
        ({"store": "redis"}, "redis_url must be set"),
        ({"redis_url": "redis://localhost"}, "of no use with store: memory"),
        ({"redis_password_file": "/x"}, "of no use with store: memory"),
        ({"store": "redis", "redis_url": "http://u:hush@localhost"}, "no URL that begins with redis://"),
        ({"store": "redis", "redis_url": "redis://u:hush@localhost:many"}, "no URL that begins with redis://"),
        ({"store": "redis", "redis_url": "redis://:hush@[localhost"}, "no URL that begins with redis://"),
        (
            {"store": "redis", "redis_url": "redis://:hush@localhost", "redis_password_file": "/x"},
            "redis_url holds a password and redis_password_file is set",
        ),
        ({"store": "redis", "redis_url": "redis://redis.example"}, "names redis.example, which others can reach"),
        ({"store": "redis", "redis_url": "redis://localhost", "namespace": "a b"}, "directory.namespace"),
    ],
    ids=str,
)
def test_a_store_that_cannot_be_right_is_refused_without_its_secret(directory, expected):
    with pytest.raises(ConfigError) as raised:
        load(**directory)
    assert expected in str(raised.value)
    assert "hush" not in str(raised.value)


def test_an_open_redis_can_be_allowed():
    flags = {"directory.store": "redis", "directory.redis_url": "redis://redis.example", "insecure": True}
    load_config(BootstrapConfig, environment={}, flags=flags)


def test_the_url_is_not_shown():
    shown = render_config(load(store="redis", redis_url="redis://:hush@localhost"))
    assert "hush" not in shown
    assert "redis_url: '**********'" in shown
