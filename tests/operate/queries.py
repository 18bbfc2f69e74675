"""Queries of the boards, as Grafana sends them when everything is chosen."""

from __future__ import annotations

VARIABLES = {
    "$__rate_interval": "1m",
    "$__range": "1m",
    **dict.fromkeys(("$instance", "$role", "$peer"), ".+"),
}


def expression(query: str, space: str = "full") -> str:
    """What Grafana would send."""
    for name, value in {**VARIABLES, "$space": space}.items():
        query = query.replace(name, value)
    assert "$" not in query, query
    return query
