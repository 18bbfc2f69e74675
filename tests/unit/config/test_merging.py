"""How mappings of several sources meet."""

from __future__ import annotations

from kvbridge.config.loading import load_config
from kvbridge.config.schema import BootstrapConfig


def test_mappings_merge_and_do_not_hide_one_another(tmp_path):
    file = tmp_path / "b.yaml"
    file.write_text("http: {port: 1, host: localhost}\n")
    config = load_config(
        BootstrapConfig,
        file=file,
        environment={"KVBRIDGE_HTTP": '{"max_wait_s": 5}'},
        overrides=["http={max_body_bytes: 9}"],
        flags={"http": {"port": 7}},
    )
    assert config.http.model_dump(include={"port", "host", "max_wait_s", "max_body_bytes"}) == {
        "port": 7,
        "host": "localhost",
        "max_wait_s": 5.0,
        "max_body_bytes": 9,
    }


def test_an_empty_mapping_takes_nothing_away(tmp_path):
    file = tmp_path / "b.yaml"
    file.write_text("http: {port: 1}\n")
    assert load_config(BootstrapConfig, file=file, environment={}, overrides=["http={}"]).http.port == 1
