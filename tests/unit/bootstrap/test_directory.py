"""The directory: incarnations, expiry, completeness, agreement; over both stores."""

import pytest

from kvbridge.api.directory import ControlMode, Load
from kvbridge.bootstrap.directory import Directory, absences
from kvbridge.core import errors
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.ids import Rank, Role
from kvbridge.core.wire.messages import MAX_INSTANCE_NODES
from tests.unit.bootstrap.fleet import EXPIRE_AFTER_S, beat, half, node

PLAIN, CURVE, LOCAL = ControlMode.PLAIN, ControlMode.CURVE, ControlMode.LOCAL
WITH_KEY = {"control": PeerAddress(endpoint="tcp://p:1", public_key="k" * 40), "meets_by": (CURVE,)}
SECOND = node("p", Role.PREFILL, incarnation="second", http_url="http://second")


async def test_a_second_process_of_a_name_is_kept_out_while_the_first_answers(world, port):
    directory = await world.directory(node("p", Role.PREFILL), daemons=port)
    port.lives = {"http://p": "p-incarnation-1", "http://second": "second"}
    for _ in range(2):
        with pytest.raises(errors.ConflictError, match=r"is incarnation p-incarnation-1 at http://p, .* one name"):
            await directory.register(SECOND)
        assert (await directory.heartbeat("p", "node-0", beat("p-incarnation-1"))).http_url == "http://p"
    assert port.asked == ["http://p", "http://p"]
    await directory.register(node("p", Role.PREFILL, http_url="http://moved"))
    assert len(port.asked) == 2, "who registers again is not asked about"


@pytest.mark.parametrize("answer", ["", "second", "p-incarnation-9"], ids=["nobody", "its successor", "another"])
async def test_a_daemon_that_was_killed_is_replaced_at_once(world, port, answer):
    directory = await world.directory(node("p", Role.PREFILL), daemons=port)
    port.lives = {"http://p": answer}
    assert (await directory.register(SECOND)).epoch == 2


FAULTS = {
    "refused": errors.UnauthorizedError("which token?"),
    "away": errors.DeadlineError("5 s"),
    "hangs up": errors.PeerError("Connection reset by peer"),
}


@pytest.mark.parametrize("fault", ["silent", *FAULTS])
async def test_a_name_whose_holder_cannot_be_asked_is_free_when_it_has_been_silent(world, port, fault):
    directory = Directory(world.store, port, probe_s=0.02)
    await directory.register(node("p", Role.PREFILL))
    if fault == "silent":
        port.hang.add("http://p")
    else:
        port.refuse["http://p"] = FAULTS[fault]
    with pytest.raises(errors.ConflictError, match=r"could not be asked .* free after directory\.expire_after_s"):
        await directory.register(SECOND)
    world.advance(EXPIRE_AFTER_S + 0.1)
    assert (await directory.register(SECOND)).incarnation == "second"


async def test_a_new_incarnation_replaces_the_old_one(world):
    directory = await world.directory(node("p", Role.PREFILL))
    view = await directory.register(node("p", Role.PREFILL, incarnation="second", http_url="http://new"))
    assert view.epoch == 2
    with pytest.raises(errors.StaleError, match="now incarnation second at http://new"):
        await directory.heartbeat("p", "node-0", beat("p-incarnation-1"))
    with pytest.raises(errors.StaleError, match="was replaced by second"):
        await directory.register(node("p", Role.PREFILL))
    with pytest.raises(errors.StaleError):
        await directory.deregister("p", "node-0", "p-incarnation-1")
    assert (await directory.heartbeat("p", "node-0", beat("second"))).epoch == 2


@pytest.mark.parametrize(
    ("changes", "error", "expected"),
    [
        ({"pp_size": 2}, errors.ConflictError, "its pp_size is 2"),
        ({"tp_size": 4}, errors.ConflictError, "its tp_size is 4"),
        ({"role": Role.DECODE}, errors.ConflictError, "its role is decode, that of node 'node-0' is prefill"),
        ({"ranks": (Rank(pp=0, tp=0),)}, errors.ConflictError, r"rank pp0\.tp0 already lives on node 'node-0' at"),
        (WITH_KEY, errors.ConflictError, "it meets others by curve, node 'node-0' by plain"),
        ({"model": "tiny-gqa"}, errors.FingerprintMismatchError, r"components\.\w+ exists only"),
    ],
)
async def test_nodes_of_an_instance_agree(world, changes, error, expected):
    directory = await world.directory(half("p", Role.PREFILL, 0))
    with pytest.raises(error, match=expected):
        await directory.register(half("p", **{"role": Role.PREFILL, "number": 1} | changes))
    assert len((await directory.instances())[0].nodes) == 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"fingerprint": "0" * 32}, "is not that of its geometry"),
        ({"host": ("swa_kv",)}, "cannot live in its host pool"),
        ({"ranks": ()}, "has no rank"),
        ({"ranks": (Rank(pp=0, tp=1),)}, "no rank pp0.tp1 in 1 x 1"),
        ({"ranks": (Rank(pp=0, tp=0),) * 2}, "listed twice"),
        ({"pp_size": 2, "stage_boundaries": (99,)}, "node 'node-0' of instance 'p': boundaries of 2 stages"),
        ({"meets_by": (CURVE,)}, "its control address differs"),
        (WITH_KEY | {"meets_by": (LOCAL,)}, "its control address differs"),
    ],
)
async def test_a_registration_that_contradicts_itself_is_refused(world, changes, expected):
    with pytest.raises(errors.InvalidInputError, match=expected.replace(".", r"\.")):
        await world.directory(node("p", Role.PREFILL, **changes))


async def test_a_charge_lasts_until_the_next_heartbeat(world):
    directory = await world.directory(node("p", Role.PREFILL, free=10))
    (instance,) = await directory.instances()
    await directory.charge([(instance, {"full": 4, "host": 3})])
    load = await load_of(directory)
    assert (load.available_pages["full"], load.available_pages["swa"], load.rooms) == (6, 10, 1)
    await directory.charge([(instance, {"full": 40})])
    load = await load_of(directory)
    assert (load.available_pages["full"], load.rooms) == (0, 2)
    await directory.heartbeat("p", "node-0", beat("p-incarnation-1", load=Load(available_pages={"full": 9})))
    load = await load_of(directory)
    assert (load.available_pages["full"], load.rooms) == (9, 0)


async def load_of(directory: Directory) -> Load:
    (instance,) = await directory.instances()
    (record,) = instance.nodes
    return record.view().load


async def test_instances_that_cannot_meet_say_so(world):
    plain = node("d", Role.DECODE, meets_by=(PLAIN, LOCAL), control=None)
    directory = await world.directory(node("p", Role.PREFILL, **WITH_KEY), plain)
    decode, prefill = await directory.listing()
    remedy = "give all of them keys (control.curve.secret_key_file), or none (and `insecure`, beyond one machine)"
    assert (decode.ready, decode.meets_by) == (False, (LOCAL, PLAIN))
    assert decode.reasons == (f"'d' meets others by local or plain, prefill instances of its model by curve: {remedy}",)
    assert (prefill.ready, prefill.meets_by) == (False, (CURVE,))
    assert len(absences((decode, prefill))) == 2
    await directory.register(node("e", Role.DECODE, meets_by=(CURVE,), control=None))
    assert {view.instance: view.ready for view in await directory.listing()} == {"p": True, "d": False, "e": True}
    assert absences(await directory.listing()) == ()


async def test_a_size_that_nobody_has_is_no_work(world):
    directory = await world.directory(node("p", Role.PREFILL, tp_size=2**62))
    (view,) = await directory.listing()
    assert view.reasons == (f"{2**62 - 1} of its ranks are missing, first pp0.tp1",)


async def test_who_is_absent_is_told(world):
    directory = await world.directory(node("p", Role.PREFILL))
    assert absences(await directory.listing()) == ("no decode instance is ready (0 known)",)
    await directory.register(node("d", Role.DECODE, ready=False))
    (why,) = absences(await directory.listing())
    assert why == "no decode instance is ready (1 known; 'd': node 'node-0' is not ready)"
    await directory.heartbeat("d", "node-0", beat("d-incarnation-1"))
    assert absences(await directory.listing()) == ()


async def test_two_halves_of_two_pairs_are_no_pair(world):
    directory = await world.directory(
        node("p", Role.PREFILL),
        node("d", Role.DECODE, ready=False),
        node("q", Role.PREFILL, model="tiny-gqa", ready=False),
        node("e", Role.DECODE, model="tiny-gqa"),
    )
    (why,) = absences(await directory.listing())
    assert why.startswith("no ready prefill instance can be paired with a ready decode instance; 'd': node")


async def test_an_instance_has_no_more_nodes_than_a_room_may_have_addresses(world):
    size = MAX_INSTANCE_NODES + 1
    nodes = [half("p", Role.PREFILL, number, tp_size=size) for number in range(size)]
    directory = await world.directory(*nodes[:-1])
    with pytest.raises(errors.ConflictError, match=rf"one too many: .* has {MAX_INSTANCE_NODES} nodes"):
        await directory.register(nodes[-1])
    await directory.register(nodes[0])
