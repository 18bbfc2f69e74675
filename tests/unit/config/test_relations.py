"""Each relation between settings: what is refused, and that the text names the keys."""

import pytest

from kvbridge.config.endpoints import HttpConfig, ListeningControlConfig
from kvbridge.config.loading import load_config, render_config
from kvbridge.config.pools import ParallelismConfig
from kvbridge.config.schema import LONGEST_RUNTIME_DIR, BootstrapConfig, DecodeConfig, PrefillConfig
from kvbridge.core.errors import ConfigError

KEY = "k" * 40
BASE = {"instance": "i0", "model.preset": "tiny-v4", "pools.device.full": 8}
TIER = {"enabled": True, "model_name": "m", "model_revision": "1"}
BOTH_BACKENDS = {"pages": 1, "layout": "page_first_direct", "backend": "kernel"}
WITH_KEYS = {"control.curve": {"secret_key_file": "/k", "allowed_public_keys": [KEY]}}

REFUSED = [
    ({"http.host": "0.0.0.0"}, "http.host is 0.0.0.0"),
    ({"http.host": "prefill.example"}, "there is no token"),
    ({"control.bind": "tcp://10.0.0.1:5"}, "there are no keys"),
    ({"control.bind": "tcp://0.0.0.0:5", **WITH_KEYS}, "set advertise"),
    ({"control.bind": "tcp://0.0.0.0:5", "control.advertise": "tcp://0.0.0.0:5"}, "no address that a peer can use"),
    ({"control.curve": {"allowed_public_keys": [KEY]}}, "without secret_key_file"),
    ({"control.curve": {"secret_key_file": "/k", "allowed_public_keys": ["short"]}}, "allowed_public_keys.0"),
    ({"http.token": "a", "http.token_file": "/t"}, "keep one"),
    ({"bootstrap.token": "a", "bootstrap.token_file": "/t"}, "keep one"),
    ({"http.tls_key_file": "/k"}, "belong together"),
    ({"http.host": "0.0.0.0", "http.token": "a", "bootstrap.url": "http://b:1"}, "set http.advertise_url"),
    ({"model.preset": "gpt-9"}, "preset 'gpt-9' does not exist"),
    ({"model.hf_config": "/c"}, "exactly one of preset, hf_config and geometry"),
    ({"model.preset": None, "model.geometry": "/g", "model.tokens_per_page": 64}, "a geometry has its own"),
    ({"parallelism.pp_size": 3, "parallelism.stage_boundaries": [4]}, "needs 2 entries (pp_size - 1)"),
    ({"parallelism.pp_size": 3, "parallelism.stage_boundaries": [4, 4]}, "must ascend"),
    ({"parallelism.ranks": [{"pp": 0, "tp": 1}]}, "pp0.tp1 does not exist"),
    ({"parallelism.ranks": [{"pp": 0, "tp": 0}] * 2}, "listed twice"),
    ({"pools.device.full": 0}, "device.full is 0"),
    ({"pools.memory": "adopted"}, "leave device.* at 0"),
    ({"timeouts.control_resend_s": 40}, "control_resend_s (40 s) must be shorter than control_delivery_s (30 s)"),
    ({"admission.retry_after_min_s": 31}, "retry_after_min_s (31 s) must not exceed retry_after_max_s (30 s)"),
    ({"runtime_dir": "/" + "x" * 100}, "runtime_dir has 101 bytes"),
    ({"tier.enabled": True}, "tier: enabled without model_name and model_revision: geometry does not tell"),
    ({"tier.enabled": True, "tier.model_name": "m"}, "set both or neither"),
    ({"tier.events": {}}, "events is set but nothing is cached"),
    ({"tier": TIER | {"events": {"endpoint": "tcp://*:5557"}}}, "tcp://*:5557, which others can reach"),
    ({"tier": TIER | {"events": {"replay_endpoint": "tcp://10.0.0.1:1"}}}, "tcp://10.0.0.1:1, which others can reach"),
]

ON_HOST = {"pools.host.pages": 8}
ADOPTED = {**ON_HOST, "pools.memory": "adopted", "pools.device.full": 0}

REFUSED_DECODE = [
    ({**ON_HOST, "control.bind": "tcp://10.0.0.1:5"}, "control: bind: of no use on a decode node"),
    ({**ON_HOST, "tier": TIER | {"host": BOTH_BACKENDS}}, "page_first_direct asks for backend direct"),
    ({"pools.host": {}}, "host pool without pages"),
    ({"pools.host": {"pages": 1, "size_bytes": 1}}, "keep one"),
    ({"pools.host": {"memory": "adopted"}}, "host.memory is adopted and memory is owned"),
    ({"pools.host": {"memory": "adopted", "pages": 1}}, "leave pages and size_bytes at 0"),
    ({"pools.host": {"pages": 1, "components": ["c4_kv", "c4_kv"]}}, "one kind twice"),
    ({"pools.host": {"pages": 1, "extent_bytes": "2GiB", "mapping_bytes": "1GiB"}}, "must not exceed mapping_bytes"),
    ({**ON_HOST, "sparse": {"max_requests": 4}, "pools.device.request": 5}, "gives out 5 request slots, but the"),
    ({"sparse": {"max_requests": 4}, "pools.host": {"components": []}}, "components must name one component"),
    ({**ADOPTED, "sparse": {"max_requests": 4}}, "the engine names its own request slots"),
    ({**ADOPTED, "transports.order": ["local"]}, "local alone, which does not reach host memory that an engine brings"),
    ({**ON_HOST, "sparse": {"max_requests": 4, "hot_rows": 64}}, "hot_rows is 64, less than top_k 512"),
]

REDIS = {"directory.store": "redis"}
REFUSED_BOOTSTRAP = [
    (REDIS, "redis_url must be set"),
    ({"directory.redis_url": "redis://localhost"}, "of no use with store: memory"),
    ({"directory.redis_password_file": "/x"}, "of no use with store: memory"),
    ({**REDIS, "directory.redis_url": "http://u:hush@localhost"}, "no URL that begins with redis://"),
    ({**REDIS, "directory.redis_url": "redis://u:hush@localhost:many"}, "no URL that begins with redis://"),
    ({**REDIS, "directory.redis_url": "redis://:hush@[localhost"}, "no URL that begins with redis://"),
    (
        {**REDIS, "directory.redis_url": "redis://:hush@localhost", "directory.redis_password_file": "/x"},
        "redis_url holds a password and redis_password_file is set",
    ),
    ({**REDIS, "directory.redis_url": "redis://redis.example"}, "names redis.example, which others can reach"),
    ({**REDIS, "directory.redis_url": "redis+sentinel://localhost:1,b.example/kv"}, "names b.example, which others"),
    ({**REDIS, "directory.redis_url": "redis+sentinel://localhost:1,b:many/kv"}, "no URL that begins with redis://"),
    ({"http.host": "0.0.0.0"}, "http.host is 0.0.0.0"),
    ({"timeouts.reserve_s": 30}, "must not exceed pair_s"),
    ({"timeouts.ticket_s": 700}, "would outlive"),
]


CASES = [
    *((PrefillConfig, BASE | flags, expected) for flags, expected in REFUSED),
    *((DecodeConfig, BASE | flags, expected) for flags, expected in REFUSED_DECODE),
    *((BootstrapConfig, flags, expected) for flags, expected in REFUSED_BOOTSTRAP),
]


@pytest.mark.parametrize(("kind", "flags", "expected"), CASES, ids=lambda value: str(value)[:50])
def test_what_does_not_fit_together_is_refused(kind, flags, expected):
    with pytest.raises(ConfigError) as raised:
        load_config(kind, environment={}, flags=flags)
    assert expected in str(raised.value)
    assert "hush" not in str(raised.value)


@pytest.mark.parametrize(
    "flags",
    [
        {"http.host": "0.0.0.0", "insecure": True},
        {"http.host": "0.0.0.0", "http.token_file": "/t"},
        {"http.host": "::1"},
        {"http.host": "localhost"},
        {"control.bind": "tcp://10.0.0.1:0", **WITH_KEYS},
        {"control.bind": "tcp://10.0.0.1:0", "insecure": True},
        {"control.bind": "ipc:///run/x"},
        {"control.bind": "tcp://10.0.0.1:0", "control.curve": {"secret_key_file": "/k"}},
        # A path that is as long as a key, and of its alphabet.
        {"control.curve": {"secret_key_file": "/etc/kvbridge/keys/of-the/prefill-00.key"}},
        {"pools.memory": "adopted", "pools.device.full": 0},
        {"runtime_dir": "/" + "x" * (LONGEST_RUNTIME_DIR - 1)},
    ],
    ids=str,
)
def test_a_sound_daemon_is_accepted(flags):
    load_config(PrefillConfig, environment={}, flags={**BASE, **flags})


@pytest.mark.parametrize(
    "directory",
    [
        {"redis_url": "redis://localhost:6379/0"},
        {"redis_url": "unix:///run/redis.sock", "namespace": "cluster-1:kv"},
        {"redis_url": "rediss://user:hush@redis.example:6380/2?ssl_ca_certs=/etc/ca.pem"},
        {"redis_url": "redis://redis.example", "redis_password_file": "/run/secrets/redis"},
    ],
    ids=str,
)
def test_a_sound_store_is_accepted_and_not_shown(directory):
    config = load_config(BootstrapConfig, environment={}, flags={"directory": {"store": "redis", **directory}})
    shown = render_config(config)
    assert "redis_url: '**********'" in shown
    assert "hush" not in shown


def test_port_0_in_an_advertised_address_is_the_bound_port():
    control = ListeningControlConfig(bind="tcp://10.0.0.1:0", advertise="tcp://node-7:0")
    assert control.advertised("tcp://10.0.0.1:4711") == "tcp://node-7:4711"
    assert ListeningControlConfig(advertise="tcp://node-7:10").advertised("tcp://x:4711") == "tcp://node-7:10"
    assert ListeningControlConfig().advertised("tcp://127.0.0.1:4711") == "tcp://127.0.0.1:4711"
    http = HttpConfig(advertise_url="https://node-7:0/")
    assert http.advertised("http://10.0.0.1:80") == "https://node-7:80"
    assert HttpConfig(advertise_url="https://node-7/").advertised("http://10.0.0.1:80") == "https://node-7"


def test_placements_fill_in_every_rank():
    cpu = ParallelismConfig(pp_size=2, tp_size=2).placements()
    assert [str(place.rank) for place in cpu] == ["pp0.tp0", "pp0.tp1", "pp1.tp0", "pp1.tp1"]
    assert {place.device for place in cpu} == {"cpu"}
    cuda = ParallelismConfig(tp_size=2, device="cuda").placements()
    assert [place.device for place in cuda] == ["cuda:0", "cuda:1"]
