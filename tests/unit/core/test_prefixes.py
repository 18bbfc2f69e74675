"""Which namespaces a token may name, and whose pages a decode node takes."""

import pytest
from pydantic import TypeAdapter, ValidationError

from kvbridge.core.errors import ConfigError, NamespaceError
from kvbridge.core.prefixes import ANY_NAMESPACE, ModelIdentity, Namespace, Namespaces, TokenGrant, identity_conflict

SECRET = "a-long-secret"


def parse(line: str) -> TokenGrant:
    return TokenGrant.parse(line, key="http.token_file")


def test_a_bare_token_may_name_the_default_namespace_only():
    grant = parse(SECRET)
    assert (grant.token, grant.namespaces) == (SECRET, Namespaces())
    assert "" in grant.namespaces
    assert "acme" not in grant.namespaces


@pytest.mark.parametrize(
    ("names", "may", "may_not"),
    [
        ("acme", {"acme"}, {"", "globex", "acm", "*"}),
        ("acme,globex", {"acme", "globex"}, {"", "acme,globex"}),
        ("acme,-", {"acme", ""}, {"globex", "-"}),
        ("*", {"", "acme", "globex"}, set()),
        ("", set(), {"", "acme"}),
    ],
)
def test_a_line_says_what_its_bearer_may_name(names, may, may_not):
    grant = parse(f"{SECRET} namespaces={names}")
    assert grant.token == SECRET
    assert {name for name in may | may_not if name in grant.namespaces} == may


@pytest.mark.parametrize("name", ["a b", ".acme", "ä", "a/b", "x" * 65, "a*"])
def test_a_line_with_a_name_that_is_none_is_refused_without_showing_the_token(name):
    line = f"{SECRET} namespaces={name}" if " " not in name else f"{SECRET} namespaces=ok,{name.replace(' ', '!')}"
    with pytest.raises(ConfigError, match=r"http\.token_file: .*is no namespace") as error:
        parse(line)
    assert SECRET not in str(error.value)
    with pytest.raises(ValidationError):
        TypeAdapter(Namespace).validate_python(name)


def test_a_line_without_its_token_is_refused():
    with pytest.raises(ConfigError, match="expected the token in front of it"):
        parse("namespaces=acme")


def test_a_grant_is_shown_without_its_token():
    assert SECRET not in repr(parse(f"{SECRET} namespaces=acme"))


def test_a_refusal_names_the_namespace_and_what_the_token_may_name():
    tenant = Namespaces(frozenset({"acme", ""}))
    tenant.require("acme", keyed=True)
    tenant.require("", keyed=True)
    with pytest.raises(NamespaceError, match=r"'globex': it may name the default one, 'acme'"):
        tenant.require("globex", keyed=False)
    ANY_NAMESPACE.require("globex", keyed=True)


def test_a_request_that_shares_nothing_needs_no_namespace():
    tenant = Namespaces(frozenset({"acme"}))
    tenant.require("", keyed=False)
    with pytest.raises(NamespaceError, match="page_hashes without a namespace"):
        tenant.require("", keyed=True)


ONE, TWO = ModelIdentity(name="m", revision="1"), ModelIdentity(name="m", revision="2")


@pytest.mark.parametrize(
    ("prefill", "decode", "fits"),
    [
        (None, None, True),
        (ONE, None, True),
        (ONE, ModelIdentity(name="m", revision="1"), True),
        (ONE, TWO, False),
        (None, ONE, False),
    ],
)
def test_a_decode_node_takes_pages_of_the_model_that_it_says_it_holds(prefill, decode, fits):
    conflict = identity_conflict(prefill, decode)
    assert bool(conflict) is not fits
    if conflict:
        assert str(decode) in conflict
        assert "tier.model_revision" in conflict
