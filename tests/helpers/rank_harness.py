"""A request from real prefill rank workers to real decode rank workers, and what must be true of every byte of both pools."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kvbridge.config.transports import MooncakeSettings, NixlSettings, TransportName, TransportSettings
from kvbridge.core.geometry.components import Component, ModelGeometry
from kvbridge.core.geometry.manifest import RankManifest
from kvbridge.core.geometry.pages import first_window_page, pages_needed
from kvbridge.core.ids import IndexSpace, PageIdArray, PageTable, Tables
from kvbridge.core.plan.operations import Amounts, Section, add_amounts, split_rows
from kvbridge.core.plan.pairing import Demand, shortfall
from kvbridge.core.wire.codec import pack_rank
from kvbridge.core.wire.messages import to_wire
from kvbridge.core.wire.worker_messages import CloseRoom, ConnectPeer, OpenRoom, PeerConnected, RoomClosed, Send, Sent
from tests.helpers import synthetic
from tests.helpers.rank_pools import CANARY, DestinationProcess, Form, NodePools, Ranks, WorkerThread, stop_all
from tests.helpers.rooms import all_rows, lane_rows

SOURCE_COLOUR = 0
TRANSFER_TIMEOUT_S = 20.0
PEER = "destination"


@dataclass(frozen=True)
class Case:
    tokens: int
    stops: tuple[int, ...] = ()
    """Tokens at which chunks end, before the last one."""
    prefix: int = 0
    """Tokens that decode already holds."""
    by_layer: bool = False
    """Whether each chunk is sent layer by layer."""
    waits: bool = True
    """Whether a chunk has arrived before the next is computed."""
    longest_run: int = 1
    """Most neighbouring page ids in a row, on both sides."""

    def __str__(self) -> str:
        words = [f"{self.tokens}"]
        if self.stops:
            words.append("cut" + ".".join(map(str, self.stops)))
        if self.prefix:
            words.append(f"prefix{self.prefix}")
        words += [name for name, said in (("bylayer", self.by_layer), ("overlapping", not self.waits)) if said]
        return "-".join(words)

    def sections(self, layers: Sequence[int]) -> list[Section]:
        groups = [(layer,) for layer in layers] if self.by_layer else [None]
        edges = (0, *self.stops, self.tokens)
        return [
            Section(
                prompt_tokens=self.tokens, prefix_tokens=self.prefix, start_token=start, stop_token=stop, layers=group
            )
            for start, stop in itertools.pairwise(edges)
            for group in groups
        ]


@dataclass(frozen=True)
class Setting:
    geometry: ModelGeometry
    source: Ranks
    destination: Ranks
    source_form: Form
    destination_form: Form
    transport: str
    label: str = ""
    dead_bytes: bool = False
    """Whether a backend may send dead bytes of the request's own pages along, where it does so unless told otherwise."""

    def __hash__(self) -> int:
        """Forms have tables, which have none; pytest keeps together, and makes once, only parameters that have one."""
        return hash(str(self))

    def __str__(self) -> str:
        words = (self.transport, self.label, f"{self.source}_to_{self.destination}")
        return "-".join(word for word in words if word)


def transport_settings(name: str, *, dead_bytes: bool = False) -> TransportSettings:
    """One backend, over loopback; nixl with operations that have to be cut. Nothing but live rows is sent without `dead_bytes`."""
    return TransportSettings(
        order=(TransportName(name),),
        # Timeouts are those of the daemons: the library takes one set of them in a process.
        mooncake=MooncakeSettings(operation_cost_bytes=None if dead_bytes else 0),
        # A machine that is busy with other tests takes its time for a process that parses what a peer says of itself.
        nixl=NixlSettings(
            ucx_tls="tcp", ucx_net_devices="lo", connect_timeout_s=10, check_timeout_s=60, max_operation_bytes=200_000
        ),
    )


class Crossing:
    def __init__(
        self,
        setting: Setting,
        source: NodePools,
        destination: NodePools,
        manifests: Sequence[RankManifest],
        workers: list[WorkerThread],
    ) -> None:
        self.setting = setting
        self.source = source
        self.destination = destination
        self._manifests = manifests
        self._workers = workers
        self._rooms = itertools.count(1)

    def deliver(self, case: Case, *, seed: int = 0) -> None:
        room = next(self._rooms)
        random = np.random.default_rng((seed, room, case.tokens))
        source, destination = draw_tables(self.setting, case, random)
        try:
            self._open(room, case, source, destination)
            amounts = self._send(room, case, source)
            self._close(room)
            self._check_rows(room, case, destination)
            self._check_amounts(case, amounts)
            self.destination.canvas.paint_request(
                destination, tokens=case.tokens, prefix_tokens=case.prefix, whole_pages=self.setting.dead_bytes
            )
            stray = self.destination.canvas.stray()
            assert stray is None, f"written outside of the request: {stray}"
        except BaseException:
            self.destination.canvas.paint()
            raise

    def _open(self, room: int, case: Case, source: Tables, destination: Tables) -> None:
        opening = OpenRoom(
            room=room,
            generation=1,
            peer=PEER,
            prompt_tokens=case.tokens,
            prefix_tokens=case.prefix,
            source=to_wire(source),
            destination=to_wire(destination),
        )
        for worker in self._workers:
            worker.tell(opening)

    def _send(self, room: int, case: Case, source: Tables) -> Amounts:
        """Compute and send chunk after chunk; each writer reports its share. Returns what all report together."""
        order = itertools.count(1)
        plans = [case.sections(worker.setup.layers) for worker in self._workers]
        amounts: list[Amounts] = [{} for _ in self._workers]
        pending = [0] * len(self._workers)
        for stop in (*case.stops, case.tokens):
            for index, worker in enumerate(self._workers):
                for section in (section for section in plans[index] if section.stop_token == stop):
                    synthetic.fill(self.source.views[index], room=room, tables=source, section=section)
                    worker.tell(Send(room=room, generation=1, order=next(order), section=section))
                    pending[index] += 1
            if case.waits or stop == case.tokens:
                for index, worker in enumerate(self._workers):
                    for _ in range(pending[index]):
                        amounts[index] = add_amounts(amounts[index], _amounts(worker.hear(Sent)))
                    pending[index] = 0
        demand = Demand(self.setting.geometry, self._manifests)
        for worker, reported in zip(self._workers, amounts, strict=True):
            setup = worker.setup
            share = demand.share(setup.rank, tp_size=setup.tp_size, layers=setup.layers)
            owed = share.rows(prompt_tokens=case.tokens, prefix_tokens=case.prefix)
            assert shortfall(owed, lane_rows(reported)) is None, setup.rank
        return reduce(add_amounts, amounts)

    def _close(self, room: int) -> None:
        for worker in self._workers:
            worker.tell(CloseRoom(room=room, generation=1))
        for worker in self._workers:
            assert worker.hear(RoomClosed).quiet

    def _check_rows(self, room: int, case: Case, tables: Tables) -> None:
        for views, pool in zip(self.destination.views, self.destination.pools, strict=True):
            wrong = synthetic.compare(
                views, room=room, tables=tables, tokens=case.tokens, prefix_tokens=case.prefix
            ).mismatches
            assert not wrong, f"{pool!r}: " + "; ".join(map(str, wrong))

    def _check_amounts(self, case: Case, amounts: Amounts) -> None:
        geometry = self.setting.geometry
        expected = all_rows(geometry, Demand(geometry, self._manifests), case.tokens, case.prefix)
        assert shortfall(expected, lane_rows(amounts)) is None
        total_bytes = most_total_bytes = 0
        for component in geometry.components:
            copies = self._copies(component)
            rows = component.live_rows(case.tokens, case.prefix)
            due = rows.count * component.lanes * len(component.layers) * copies
            assert expected[component.kind] == due
            sent = amounts[component.kind].bytes if component.kind in amounts else 0
            least = due * component.row_bytes
            slots = component.slots_per_page
            complete = max(0, rows.stop // slots - -(-rows.start // slots))
            padding = complete * (component.page_bytes() - component.lanes * component.lane_block_bytes)
            most = least + padding * len(component.layers) * copies
            if self.setting.dead_bytes and rows.count:
                # Whole pages; and rows of the last one that came with an earlier chunk are sent again.
                pages = len(split_rows(component, rows).touched) + 1
                most = pages * component.page_bytes() * len(component.layers) * copies
            said = f"{component.kind}: {sent} bytes on the wire for {copies} copies of {least // copies}"
            assert sent >= least, said
            # Dead bytes between components that are sent together count for the first of them.
            assert sent <= most or self.setting.dead_bytes, said
            total_bytes, most_total_bytes = total_bytes + sent, most_total_bytes + most
        assert total_bytes <= most_total_bytes

    def _copies(self, component: Component) -> int:
        """How often the destination keeps each row: once in the host pool, else on every rank that needs its lane."""
        if component.kind in self.destination.form.host:
            return 1
        return max(1, self.setting.destination.tp // component.lanes)


def _amounts(sent: Sent) -> Amounts:
    assert not sent.error, f"rank {sent.rank}: {sent.error_code}: {sent.error}"
    return sent.amounts


@contextmanager
def crossing(setting: Setting, process: DestinationProcess, directory: Path) -> Iterator[Crossing]:
    transports = transport_settings(setting.transport, dead_bytes=setting.dead_bytes).model_dump_json()
    with ExitStack() as stack:
        # Rows are small and cores few: the oracle's threads would mostly wait for each other.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        sides = (
            (setting.source, setting.source_form, SOURCE_COLOUR),
            (setting.destination, setting.destination_form, CANARY),
        )
        source, destination = (
            stack.enter_context(closing(NodePools(setting.geometry, ranks, form, directory=directory, colour=colour)))
            for ranks, form, colour in sides
        )
        workers: list[WorkerThread] = []
        descriptions = process.start(destination.setups(transports, TRANSFER_TIMEOUT_S))
        stack.callback(_end, process, workers)
        packed = tuple(map(pack_rank, descriptions))
        workers += [WorkerThread(setup) for setup in source.setups(transports, TRANSFER_TIMEOUT_S)]
        for worker in workers:
            worker.description()
            worker.tell(ConnectPeer(peer=PEER, ranks=packed))
        for worker in workers:
            connected = worker.hear(PeerConnected)
            assert not connected.error, connected.error
            assert set(connected.transports) == {setting.transport}
        yield Crossing(setting, source, destination, [one.manifest for one in descriptions], workers)


def _end(process: DestinationProcess, workers: Sequence[WorkerThread]) -> None:
    """End both sides at once, since a transport may take a second for it."""
    process.begin_stop()
    stop_all(workers)
    process.finish_stop()


def draw_tables(setting: Setting, case: Case, random: np.random.Generator) -> tuple[Tables, Tables]:
    """Draw both tables so that no two ids at the same place are equal, and that neighbouring ids come at the same places."""
    forms = (setting.source_form, setting.destination_form)
    wanted = [
        (form.pages[space], side, space, count)
        for side, form in enumerate(forms)
        for space, count in pages_needed(setting.geometry, tokens=case.tokens, host=form.host).items()
    ]
    wanted.sort()  # the small pools first, while they still have a choice
    for _ in range(1000):
        lengths = random.integers(1, case.longest_run + 1, max(count for *_, count in wanted))
        drawn: list[PageIdArray] = []
        for page_count, _, _, count in wanted:
            drawn.append(_unlike(drawn, count, page_count, lengths, random))
            if len(drawn[-1]) < count:
                break
        else:
            tables: tuple[Tables, Tables] = ({}, {})
            for ids, (_, side, space, _) in zip(drawn, wanted, strict=True):
                first = first_window_page(setting.geometry, case.tokens) if space is IndexSpace.SWA else 0
                tables[side][space] = PageTable(space, ids, first)
            return tables
    raise AssertionError(f"found no page ids for {case} that differ everywhere; the pools are too small for it")


def _unlike(
    others: Sequence[PageIdArray],
    count: int,
    page_count: int,
    lengths: npt.NDArray[np.int64],
    random: np.random.Generator,
) -> PageIdArray:
    """Draw `count` ids that differ from the others' at every place; too few when none were found."""
    for _ in range(50):
        ids = _runs(count, page_count, lengths, random)
        if not any((ids[: len(other)] == other[:count]).any() for other in others):
            return ids
    return np.empty(0, dtype=np.int32)


def _runs(count: int, page_count: int, lengths: npt.NDArray[np.int64], random: np.random.Generator) -> PageIdArray:
    """Ids in runs of these lengths, the runs in random order with the pages that are left over between them."""
    ends = np.cumsum(lengths)
    places = np.split(np.arange(count), ends[ends < count])
    places += [np.empty(0, dtype=np.int64)] * (page_count - count)
    ids = np.empty(count, dtype=np.int32)
    free = 0
    for index in random.permutation(len(places)):
        run = places[index]
        ids[run] = np.arange(free, free + len(run))
        free += max(1, len(run))
    return ids
