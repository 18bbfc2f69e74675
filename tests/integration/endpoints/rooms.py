"""Rooms of the shared cluster with a fake node at one end."""

from kvbridge.core.ids import Rank
from kvbridge.core.wire.messages import Drained, Failed, Hello, Offer, Welcome
from tests.helpers.live_rooms import LiveCluster, ends, http
from tests.helpers.raw_peers import RawPrefill

TOKENS = 600
RANK = Rank(pp=0, tp=0)


def admitted(live: LiveCluster) -> int:
    """Admit a room on prefill that nobody has offered yet."""
    answer = http("POST", live.prefill, "/v1/requests", json={"prompt_tokens": TOKENS})
    assert answer.status_code == 201, answer.text
    return int(answer.json()["room"])


def offered_to(live: LiveCluster, *peers: RawPrefill) -> int:
    """Admit a room on decode that these fake prefill nodes are to write."""
    body = {"prompt_tokens": TOKENS, "prefill": [{"endpoint": peer.endpoint} for peer in peers]}
    answer = http("POST", live.decode, "/v1/requests", json=body)
    assert answer.status_code == 201, answer.text
    return int(answer.json()["room"])


def welcomed(live: LiveCluster, peer: RawPrefill) -> int:
    """A room on decode whose pages a fake prefill node was offered."""
    room = offered_to(live, peer)
    peer.take(Hello)
    peer.send(Welcome(instance="raw", node="node-0", incarnation=peer.incarnation, pp_size=1, tp_size=1, ranks=(RANK,)))
    peer.take(Offer, room)
    return room


def give_up(live: LiveCluster, peer: RawPrefill, room: int) -> None:
    """Let a fake prefill node fail its room, and see the room end on decode."""
    peer.send(Failed(room=room, generation=1, code="conflict", message="enough"))
    peer.send(Drained(room=room, generation=1))
    ends(live.decode, room, "failed", "conflict")
