"""CURVE keys and their files."""

import pytest

from kvbridge.control.keys import CurveKeys, check_key, generate_keys, load_keys, write_keys
from kvbridge.core.errors import ConfigError, ConflictError


def test_a_secret_is_never_printed():
    keys = generate_keys()
    for text in (repr(keys), str(keys), f"{keys}"):
        assert keys.secret not in text
        assert keys.public in text


def test_keys_survive_their_files(tmp_path):
    friend, keys = generate_keys().public, generate_keys()
    public_path = write_keys(keys, tmp_path / "node.key")
    assert public_path.read_text().strip() == keys.public
    assert (tmp_path / "node.key").stat().st_mode & 0o777 == 0o600
    allowed = tmp_path / "allowed"
    allowed.write_text(f"# friends\n#\n\n{friend}\n")
    loaded = load_keys(tmp_path / "node.key", allowed)
    assert (loaded.public, loaded.secret) == (keys.public, keys.secret)
    assert loaded.allows(friend)
    assert loaded.allows(keys.public)
    assert not loaded.allows(generate_keys().public)
    with pytest.raises(ConflictError, match="exists"):
        write_keys(keys, tmp_path / "node.key")


def test_a_secret_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "node.key"
    write_keys(generate_keys(), path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=rf"mode 0640; run: chmod 600 {path}"):
        load_keys(path)


@pytest.mark.parametrize(
    "content", [b"", b"short", b"x" * 39 + b"\\", b"~" * 40, b"\xff" * 40, b"#" * 40, b"a" * 4_000]
)
def test_what_is_no_key_is_refused_without_showing_it(tmp_path, content):
    path = tmp_path / "node.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError) as caught:
        load_keys(path)
    assert str(path) in str(caught.value)
    assert "xxx" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent.*cannot be read"):
        load_keys(tmp_path / "absent")


def test_a_wrong_line_of_the_allowed_is_named(tmp_path):
    write_keys(generate_keys(), tmp_path / "node.key")
    (tmp_path / "allowed").write_text("# comment\nnonsense\n")
    with pytest.raises(ConfigError, match="allowed line 2"):
        load_keys(tmp_path / "node.key", tmp_path / "allowed")


def test_halves_of_two_pairs_do_not_fit():
    with pytest.raises(ConfigError, match="give both of one pair"):
        CurveKeys(generate_keys().public, generate_keys().secret)
    with pytest.raises(ConfigError, match="40 characters"):
        check_key("x", "key")
