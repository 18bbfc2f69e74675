"""What has which colour.

Colours are those of Okabe and Ito, which colour-blind readers tell apart; what is good or bad is said in words or by position as
well. Series of an open set (instances, peers) are coloured by their value, from blue to red, and their legend is a table with
the highest first, so that the eye goes to the one that stands out.
"""

from __future__ import annotations

from collections.abc import Mapping

GREY, ORANGE, SKY, GREEN = "#999999", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"

COLOURS: Mapping[str, Mapping[str, str]] = {
    "{{state}}": {
        "free": SKY,
        "held": BLUE,
        "leased": YELLOW,
        "quarantined": VERMILLION,
        "cached": GREEN,
        "admitted": GREY,
        "offered": SKY,
        "transferring": BLUE,
        "committed": GREEN,
        "claimed": YELLOW,
        "completed": GREEN,
        "aborting": ORANGE,
        "aborted": PURPLE,
        "failed": VERMILLION,
        "registered": GREEN,
        "none": GREY,
        "refused": VERMILLION,
        "replaced": PURPLE,
        "unreachable": ORANGE,
        "connected": GREEN,
        "connecting": ORANGE,
        "attached": GREEN,
        "gone": ORANGE,
        "ready": GREEN,
        "starting": SKY,
        "absent": ORANGE,
    },
    "{{direction}}": {"sent": BLUE, "received": ORANGE},
    "{{residency}}": {"device": SKY, "both": GREEN, "host": BLUE},
    "{{transport}}": {"local": GREEN, "mooncake": BLUE, "nixl": ORANGE},
    "p50": {"p50": SKY},
    "p90": {"p90": BLUE},
    "p99": {"p99": VERMILLION},
}
"""By the legend of a query: its series and their colours, the same on every board."""
DASHED = frozenset({"p99", "received"})
