"""What a demo found out, as data.

Owns: the report. Must not know: how it came about, how it is printed.
"""

from __future__ import annotations

from functools import reduce

from pydantic import computed_field

from kvbridge.core.ids import FrozenModel, NonNegative, Positive
from kvbridge.core.plan.operations import Amount, Amounts
from kvbridge.testbed.demo.job import Pages, SparseFigures
from kvbridge.testbed.demo.verdict import Comparison


class HostTokens(FrozenModel):
    """Of a request's prompt, what came back from host memory."""

    prefill: NonNegative = 0
    """Of `computed_tokens`."""
    decode: NonNegative = 0
    """Of `prefix_tokens`."""

    def __add__(self, other: HostTokens) -> HostTokens:
        return HostTokens(prefill=self.prefill + other.prefill, decode=self.decode + other.decode)


class RequestReport(FrozenModel):
    """One request that went over the bridge."""

    number: Positive
    prompt_tokens: Positive
    steps: Positive
    amounts: Amounts
    """What arrived, by component."""
    moving_s: float | None
    """Plan, submit and wait until arrived, all chunks of the busiest prefill rank added; None if it did not say."""
    after_prefill_s: float
    """From the end of the prompt's computation until the request could be claimed: what the bridge added."""
    conversation: NonNegative = 0
    turn: NonNegative = 0
    page_keys: bool = False
    """Whether its pages could be shared."""
    by_itself: bool = False
    """Whether nothing else was running meanwhile."""
    prefix_tokens: NonNegative = 0
    """What decode held already."""
    computed_tokens: NonNegative = 0
    """What prefill held already; it computed the rest."""
    host_tokens: HostTokens = HostTokens()
    spared_bytes: NonNegative = 0
    """What was not sent for that."""
    arrival_s: float = 0.0
    """From the router's request until decode had the cache and the first token."""
    source_pages: Pages
    destination_pages: Pages
    comparison: Comparison
    mean_kl: float | None = None
    top1_agreement: float | None = None
    share_of_rounding: float | None = None
    sparse: SparseFigures | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def equal(self) -> bool:
        """Whether every logit is the model's own."""
        return self.comparison.equal

    @property
    def total(self) -> Amount:
        """All components together."""
        return reduce(Amount.__add__, self.amounts.values(), Amount())


class PageIds(FrozenModel):
    """Whether the two ends of the requests really were different places."""

    compared: NonNegative
    different: NonNegative


class Divergence(FrozenModel):
    """How far quantised rows and sums in another order took the model from itself."""

    mean_kl: float
    """In nats a step, over all requests."""
    top1_agreement: float


class HotBuffer(FrozenModel):
    """What sparse decode kept on the device of a request's C4 cache."""

    hot_rows: Positive
    """Of a request, in each layer."""
    ring_rows: Positive
    """Of a request, in each layer: the newest rows."""
    top_k: Positive
    """Rows that attention reads in a step and layer."""
    layers: Positive
    request_bytes: Positive
    """Device memory of a request: rows and tables of all layers."""
    row_bytes: Positive


class DemoReport(FrozenModel):
    """A whole demo."""

    verdict: str
    transport: str
    device: str = "cpu"
    """Where the models compute and where device pools are."""
    encoding: str
    prefill_stages: tuple[tuple[int, ...], ...]
    """The layers of each."""
    model: str
    weights: str
    versions: dict[str, str]
    requests: tuple[RequestReport, ...]
    most_in_flight: NonNegative
    turns: NonNegative = 0
    """Of each conversation; 0: every prompt was one of its own."""
    keep_answers: bool = False
    host_tier: bool = False
    """Whether the device pools were too small for what is kept, and host memory was below them."""
    hot_buffer: HotBuffer | None = None
    """None: decode kept whole caches."""
    pages_left: NonNegative = 0
    """Pages that were not free again at the end; 0 unless there is a defect."""
    seconds: dict[str, float]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def equal(self) -> bool:
        """Whether every request gave the very logits."""
        return bool(self.requests) and all(request.equal for request in self.requests)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def page_ids(self) -> dict[str, PageIds]:
        """Source against destination, by index space of the destination; host pages come from prefill's `full` ones."""
        found: dict[str, PageIds] = {}
        for request in self.requests:
            for space, destination in request.destination_pages.items():
                source = request.source_pages["full" if space == "host" else space][: len(destination)]
                if destination:
                    so_far = found.get(space, PageIds(compared=0, different=0))
                    different = so_far.different + (source != destination[: len(source)])
                    found[space] = PageIds(compared=so_far.compared + 1, different=different)
        return found

    @computed_field  # type: ignore[prop-decorator]
    @property
    def scattered_requests(self) -> int:
        """Requests whose pages are not consecutive on at least one side."""
        return sum(map(is_scattered, self.requests))

    @computed_field  # type: ignore[prop-decorator]
    @property
    def divergence(self) -> Divergence | None:
        """Average over all steps, of which every request has as many."""
        kl = [request.mean_kl for request in self.requests if request.mean_kl is not None]
        agreed = [request.top1_agreement for request in self.requests if request.top1_agreement is not None]
        if not kl or not agreed:
            return None
        return Divergence(mean_kl=sum(kl) / len(kl), top1_agreement=sum(agreed) / len(agreed))

    @property
    def good(self) -> bool:
        """Whether the demo has shown what it is there to show."""
        return self.equal and self.reused and not self.pages_left

    @property
    def reused(self) -> bool:
        """Whether both sides have made use of what they held, if there was anything to."""
        held = [any(each.prefix_tokens for each in self.requests), any(each.computed_tokens for each in self.requests)]
        if self.host_tier:
            held += [bool(self.host_tokens.prefill), bool(self.host_tokens.decode)]
        return all(held) or not self.turns

    @property
    def host_tokens(self) -> HostTokens:
        """Of all requests."""
        return reduce(HostTokens.__add__, (request.host_tokens for request in self.requests), HostTokens())


def is_scattered(request: RequestReport) -> bool:
    """Whether a request's pages are not consecutive in some space on some side."""
    tables = (*request.source_pages.values(), *request.destination_pages.values())
    return any(list(ids) != list(range(ids[0], ids[0] + len(ids))) for ids in tables if ids)
