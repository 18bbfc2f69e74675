"""What the demo knows of each of its requests so far.

Owns: the account of a request, from its prompt to its line of the report. Must not know: processes, rooms other than by number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvbridge.core.plan.operations import Amounts
from kvbridge.testbed.demo.job import Claimed, Decoded, Pages, Prompt, logits_file, trace_file
from kvbridge.testbed.demo.report import RequestReport
from kvbridge.testbed.demo.trace import Trace
from kvbridge.testbed.demo.verdict import Comparison, compare, read_logits


@dataclass
class DemoRequest:
    """One request."""

    prompt: Prompt
    room: int = 0
    """0: not paired yet."""
    source_pages: Pages = field(default_factory=dict)
    destination_pages: Pages = field(default_factory=dict)
    amounts: Amounts = field(default_factory=dict)
    phases_s: dict[str, float] = field(default_factory=dict)
    finished_s: float = 0.0
    claimed_s: float = 0.0
    decoded: Decoded | None = None
    alone: Decoded | None = None

    @property
    def in_flight(self) -> bool:
        """Whether it has a room and is not through."""
        return bool(self.room) and self.decoded is None

    def on_claimed(self, event: Claimed) -> None:
        """The decode engine has it."""
        self.destination_pages, self.amounts = event.pages, event.amounts
        self.phases_s, self.claimed_s = event.phases_s, event.claimed_s

    def report(self, steps: int, folder: Path) -> RequestReport:
        """Compare what came over the bridge with the model alone: what the processes wrote into `folder`."""
        number = self.prompt.number
        phases = self.phases_s
        moving = {"first_byte", "move"} <= phases.keys()
        return RequestReport(
            number=number,
            prompt_tokens=self.prompt.tokens,
            steps=steps,
            amounts=self.amounts,
            moving_s=phases["first_byte"] + phases["move"] if moving else None,
            after_prefill_s=max(0.0, self.claimed_s - phases.get("commit_to_claim", 0.0) - self.finished_s),
            source_pages=self.source_pages,
            destination_pages=self.destination_pages,
            comparison=self._compare(folder),
            mean_kl=self.alone.mean_kl if self.alone else None,
            top1_agreement=self.alone.top1_agreement if self.alone else None,
            share_of_rounding=self.alone.share_of_rounding if self.alone else None,
            sparse=self.decoded.sparse if self.decoded else None,
        )

    def _compare(self, folder: Path) -> Comparison:
        number = self.prompt.number
        ours = read_logits(logits_file(folder, "prefill", number), logits_file(folder, "decode", number))
        alone = read_logits(logits_file(folder, "alone", number))
        traces = (Trace.read(trace_file(folder, "decode", number)), Trace.read(trace_file(folder, "alone", number)))
        return compare(number, ours, alone, traces=traces)
