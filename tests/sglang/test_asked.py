"""The names that SGLang asks of a backend are those that the adapter was written for: a new release is red here first.

`asked.txt` is `python -m tests.sglang.asked SGLANG` for the release that was read. `recorded.txt` has the names that running
schedulers asked for: servers with `KVBRIDGE_RECORDED=FILE` in their environment append them to that file.
"""

from pathlib import Path

import pytest

from tests.engines.servers import ROOT, Setup
from tests.sglang.asked import answered, asked, names
from tests.sglang.servers import HERE

READ = (HERE / "asked.txt").read_text().splitlines()
RECORDED = (HERE / "recorded.txt").read_text().split()
NOT_ANSWERED = {
    "manager.transfer_infos": "staging, which `_prefetch_staging_reqs` announces",
    "manager.attn_cp_rank": "context parallelism, refused at the start",
    "manager.attn_cp_size": "context parallelism, refused at the start",
    "sender.mark_prefill_complete": "the allocation policy prefill_complete, refused at the start",
}
"""Names without an answer of ours, and why SGLang never asks for them."""


@pytest.fixture(scope="module")
def sglang(setup: Setup) -> Path:
    """The installed package."""
    return next(setup.python.parent.parent.glob("lib/python*/site-packages/sglang"))


def test_the_installed_release_asks_for_what_was_read(sglang: Path) -> None:
    found = asked(sglang)
    news = [f"new: {line}" for line in found if line not in READ] + [
        f"gone: {line}" for line in READ if line not in found
    ]
    assert not news, "\n".join(news)


def test_the_source_shows_all_that_running_schedulers_asked_for() -> None:
    shown = names(READ)
    shown |= {
        f"{kind}.{name.partition('.')[2]}"
        for name in shown
        for kind in ("sender", "receiver")
        if name.startswith("poller.")
    }
    assert set(RECORDED) <= shown


def test_everything_is_answered(sglang: Path) -> None:
    ours = answered(ROOT / "kvbridge/engine/sglang/backend.py", sglang)
    ours["poller"] = ours["sender"] & ours["receiver"]
    missing = {
        name
        for name in names(READ, needed=True)
        if (kind := name.partition(".")[0]) in ours and name.partition(".")[2] not in ours[kind]
    }
    assert missing == NOT_ANSWERED.keys()
