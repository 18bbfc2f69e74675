"""The engines of `room_simulation`: they write and read pages, say so to their node, and call or die when they like."""

from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import BridgeError
from kvbridge.core.ids import IndexSpace, Rank, Tables
from kvbridge.core.wire.engine_messages import Fetch, Hold, RoomEvent
from kvbridge.core.wire.messages import to_wire
from kvbridge.node.decode.room import DecodeRoom
from kvbridge.node.decode.rooms import DecodeRooms
from kvbridge.node.engines import AttachedEngine
from kvbridge.node.prefill.room import STOPPING, PrefillRoom
from kvbridge.pool.accounts.book import Owner
from kvbridge.tier.keys import NO_KEYS, Keys
from tests.helpers.rooms import ADDRESS, PAGE, R0, R1
from tests.helpers.simulated_memory import RANKS, EnginePool, Label, Memory, keys_of, label, write, wrong_pages
from tests.helpers.simulated_nodes import Engines, PrefillNode, cover, table


class SimulatedCalls:
    """The engines of both nodes. A request's pages are written and compared here; `World` has the nodes."""

    adopted: bool
    shares: bool
    memory: Memory
    pool: EnginePool
    engines: Engines
    prefill: PrefillNode
    decode: DecodeRooms

    def keys(self, room: PrefillRoom | DecodeRoom) -> Keys:
        return keys_of(room.owner, room.prompt_tokens) if self.shares else NO_KEYS

    def prompt(self, owner: Owner, tokens: int) -> list[bytes]:
        """The keys of a prompt's whole pages, where prefixes are shared by nodes or by engines that bring their pages."""
        return keys_of(owner, tokens).to_list() if self.shares or self.adopted else []

    def labels(self, room: PrefillRoom | DecodeRoom) -> list[Label]:
        return self.labels_of(room.owner, room.prompt_tokens)

    def labels_of(self, owner: Owner, tokens: int) -> list[Label]:
        keys = self.prompt(owner, tokens)
        return [label(owner, keys, page) for page in range(cover(tokens))]

    def begin(self, engine: str, room: int) -> None:
        found = self.prefill.service.book.get(room)
        about = {"prompt_tokens": found.prompt_tokens, "page_hashes": self.keys(found).data}
        with self.prefill.pool.returned_if_refused(found.owner):
            if self.adopted:
                about |= self.take_source(found.owner, found.prompt_tokens)
            self.prefill.verbs.begin(engine, (rank_of(engine),), room, **about)
        self.prefill.engines.uses(engine, found.owner)
        computed = found.computed_tokens // PAGE
        self.reused["prefill"] += computed
        if self.shares or self.adopted:
            wrong = wrong_pages(self.prefill.memory, (rank_of(engine),), found.tables, self.labels(found)[:computed])
            assert not wrong, f"{found.owner} begins with {wrong}"

    def take_source(self, owner: Owner, tokens: int) -> dict[str, object]:
        """The engine finds what it has of a prompt, and takes one page more: the others follow with what is published."""
        pool, labels = self.prefill.pool, self.labels_of(owner, tokens)
        pool.take(owner, labels, at_most=(tokens - 1) // PAGE, fresh=1)
        return {"tables": table(pool.of[owner]), "computed_tokens": pool.found[owner] * PAGE}

    def hold(self, owner: Owner, *, begun: bool) -> None:
        """The engine of the prefill node (its rank 0 speaks for both) admits a room itself, for a request that it has."""
        tokens = self.prompts.setdefault(owner, PAGE + 7)
        about = {"room": owner.room, "generation": owner.generation, "prompt_tokens": tokens}
        with self.prefill.pool.returned_if_refused(owner):
            if begun:
                taken = self.take_source(owner, tokens)
                about |= taken | {"tables": to_wire(taken["tables"])}
            self.prefill.admission.admit_own(AttachedEngine("e0", 0, RANKS), Hold(call=1, **about))
        if begun:
            self.prefill.engines.uses("e0", owner)

    def fetch(self, owner: Owner, *, named: bool) -> None:
        """The engine of the decode node admits a room itself, with its pages or before it has any."""
        tokens = self.prompts.setdefault(owner, PAGE + 7)
        about = {"room": owner.room, "generation": owner.generation, "prompt_tokens": tokens}
        about |= {"prefill": (PeerAddress(endpoint=ADDRESS.endpoint),)}
        with self.pool.returned_if_refused(owner):
            if named:
                pages, prefix_tokens = self.take_destination(owner, tokens)
                about |= {"tables": to_wire(pages), "prefix_tokens": prefix_tokens}
            self.admission.admit_own(AttachedEngine("a", 0, (R0,)), Fetch(call=1, **about))

    def take_destination(self, owner: Owner, tokens: int) -> tuple[Tables, int]:
        """The engine of the decode node takes pages; those behind the prompt's beginning that it has, and how much that is."""
        self.pool.take(owner, self.labels_of(owner, tokens), at_most=tokens // PAGE)
        has = self.pool.found[owner]
        return table(self.pool.of[owner][has:], has), has * PAGE

    def prefill_engine_ends(self, engine: str, room: int, *, well: bool, again: bool = False) -> None:
        """Finish or abort (`again`: it will compute the room once more); on a room that is over either lets go of its pages."""
        ranks, using = (rank_of(engine),), self.prefill.engines.using[engine]
        mine = next((owner for owner in sorted(using) if owner.room == room), None)
        if mine is not None and (held := self.prefill.service.book.find(*mine)) is not None and held.admitted_by.name:
            ranks = RANKS
        if well:
            try:
                self.prefill.verbs.finish(engine, ranks, room, metadata=engine.encode())
            except BridgeError:
                ended = mine is not None and self.over(self.prefill.service.book.find(*mine))
                if not ended:
                    raise
        else:
            self.prefill.verbs.abort(engine, room, "enough", again=again)
        if mine is not None:
            using.discard(mine)

    @staticmethod
    def over(room: PrefillRoom | None) -> bool:
        return room is None or room.over or room.state in STOPPING

    def prefill_engine_dies(self, engine: str) -> None:
        self.prefill.service.engine_gone(engine, "killed")
        self.check()  # its GPU still writes what it had begun: nobody else may have those pages
        self.prefill.engines.using[engine].clear()
        self.prefill.service.engine_ended(engine)

    def provide(self, room: int) -> None:
        found = self.decode.book.get(room)
        with self.pool.returned_if_refused(found.owner):
            pages, prefix_tokens = self.take_destination(found.owner, found.prompt_tokens)
            self.decode_verbs.provide(room, pages, prefix_tokens=prefix_tokens)

    def decode_engine_hears(self, event: RoomEvent) -> None:
        owner = Owner(event.room, event.generation)
        if not self.adopted:
            return
        if event.kind == "committed":
            room = self.decode.book.find(*owner)
            self._check_commit(room)
            wrong = wrong_pages(self.memory, RANKS, table(self.pool.of[owner]), self.labels(room))
            assert not wrong, f"{owner} is handed over, and {wrong}"
            self.pool.know(owner, self.prompt(owner, room.prompt_tokens))
            self.decoding.add(owner)
        elif event.kind in {"aborted", "failed"}:
            self.pool.give_back(owner)

    def decode_request_ends(self, room: int) -> None:
        for owner in [owner for owner in self.decoding if owner.room == room]:
            self.decoding.discard(owner)
            self.pool.give_back(owner)

    def claim(self, engine: str, room: int) -> None:
        found = self.decode.book.get(room)
        claimed = self.decode_verbs.claim(engine, room, self.keys(found).data)
        self.reused["decode"] += claimed.prefix_tokens // PAGE
        self.engines.using[engine].add(claimed.owner)

    def decode_engine_ends(self, engine: str, room: int, *, well: bool) -> None:
        using = self.engines.using[engine]
        mine = next((owner for owner in sorted(using) if owner.room == room), None)
        # It stops to read before it says so.
        if mine is not None:
            using.discard(mine)
        if well:
            self.decode_verbs.release(engine, room)
        else:
            self.decode_verbs.abort(engine, room, "enough")

    def decode_engine_dies(self, engine: str) -> None:
        self.engines.names.discard(engine)
        self.decode.engine_gone(engine, "killed")
        self.check()
        self.engines.using[engine].clear()
        self.decode.engine_ended(engine)
        self.engines.names.add(engine)

    def publish(self, engine: str, room: int, upto: int, layers: tuple[int, ...] | None = None) -> None:
        rank, more = rank_of(engine), {}
        found = self.prefill.service.book.find(
            *next((o for o in self.prefill.engines.using[engine] if o.room == room), (room, 0))
        )
        alive = found is not None and not found.over and found.tables
        if (self.shares or self.adopted) and alive:
            pages = range(found.computed_tokens // PAGE, cover(min(upto, found.prompt_tokens)))
            tables = found.tables
            if self.adopted:
                tables, more = self.more_source(found, pages.stop)
            ranks = RANKS if found.admitted_by.name else (rank,)
            for written in ranks:
                write(self.prefill.memory, written, tables, pages, self.labels(found))
        ranks = RANKS if alive and found.admitted_by.name else (rank,)
        self.prefill.verbs.publish(engine, ranks, room, upto_token=upto, layers=layers, tables=more)
        if self.adopted and alive:
            self.prefill.pool.know(found.owner, self.prompt(found.owner, upto))

    def more_source(self, room: PrefillRoom, pages: int) -> tuple[Tables, Tables]:
        """The engine takes what it lacks for so many pages of a prompt. Returns all, and those that the node does not know."""
        pool, owner = self.prefill.pool, room.owner
        pool.take_more(owner, max(0, pages - len(pool.of[owner])))
        known = len(room.tables[IndexSpace.FULL])
        return table(pool.of[owner]), table(pool.of[owner][known:], known)


def rank_of(engine: str) -> Rank:
    return {"e0": R0, "e1": R1}[engine]
