"""What the demo knows of each of its requests so far.

Owns: the account of a request, from its prompt to its line of the report. Must not know: processes, rooms other than by number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvbridge.core.errors import ConflictError
from kvbridge.testbed.demo.conversations import Request
from kvbridge.testbed.demo.job import Began, Claimed, Decoded, Job, Text
from kvbridge.testbed.demo.report import HostTokens, RequestReport
from kvbridge.testbed.demo.trace import Trace
from kvbridge.testbed.demo.verdict import Comparison, compare, read_logits
from kvbridge.testbed.engines.messages import Finished


@dataclass
class DemoRequest:
    """One request: what the processes have reported of it."""

    planned: Request
    room: int = 0
    """0: not paired yet."""
    prompt: Text = ()
    """Known when the answer before it is."""
    asked_s: float = 0.0
    """On the machine's monotonic clock."""
    began: Began | None = None
    finished: Finished | None = None
    claimed: Claimed | None = None
    decoded: Decoded | None = None
    alone: Decoded | None = None

    @property
    def in_flight(self) -> bool:
        """Whether it has a room and is not through."""
        return bool(self.room) and self.decoded is None

    def report(self, job: Job, prefix_bytes: Callable[[int], int]) -> RequestReport:
        """Compare what came over the bridge with the model alone: what the job's processes have written.

        `prefix_bytes` says how much a prefix of so many tokens would have been, had it been sent.
        """
        if not (self.began and self.finished and self.claimed and self.decoded and self.alone):
            raise ConflictError(f"request {self.planned.number} is not through: {self}")
        phases = self.claimed.phases_s
        moving = {"first_byte", "move"} <= phases.keys()
        claimable_s = self.claimed.claimed_s - phases.get("commit_to_claim", 0.0)
        return RequestReport(
            number=self.planned.number,
            conversation=self.planned.conversation,
            turn=self.planned.turn,
            page_keys=self.planned.page_keys,
            by_itself=self.planned.by_itself,
            prompt_tokens=self.planned.tokens,
            prefix_tokens=self.claimed.prefix_tokens,
            spared_bytes=prefix_bytes(self.claimed.prefix_tokens),
            computed_tokens=self.began.computed_tokens,
            host_tokens=HostTokens(prefill=self.began.host_tokens, decode=self.claimed.host_tokens),
            arrival_s=claimable_s - self.asked_s,
            steps=job.steps,
            amounts=self.claimed.amounts,
            moving_s=phases["first_byte"] + phases["move"] if moving else None,
            after_prefill_s=max(0.0, claimable_s - self.finished.finished_s),
            source_pages=self.began.pages,
            destination_pages=self.claimed.pages,
            comparison=self._compare(job),
            mean_kl=self.alone.mean_kl,
            top1_agreement=self.alone.top1_agreement,
            share_of_rounding=self.alone.share_of_rounding,
            sparse=self.decoded.sparse,
        )

    def _compare(self, job: Job) -> Comparison:
        number = self.planned.number
        ours = read_logits(job.logits_file("prefill", number), job.logits_file("decode", number))
        alone = read_logits(job.logits_file("alone", number))
        traces = (Trace.read(job.trace_file("decode", number)), Trace.read(job.trace_file("alone", number)))
        return compare(number, ours, alone, traces=traces)
