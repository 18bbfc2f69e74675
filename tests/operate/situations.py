"""For every alert: series over simulated time in which it fires, with what it says then, and in which it nearly does.

Owns: the situations, in promtool's notation for series (`1x8` is nine times 1, `0+3x8` rises by 3 a step), a sample every 15 s.
Must not know: how promtool is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

STEP_S = 15
PREFILL = 'job="kvbridge",instance="p:7901"'
DECODE = 'job="kvbridge",instance="d:7902"'
BOOTSTRAP = 'job="kvbridge",instance="b:7900"'
BUILDS = {
    f'kvbridge_build_info{{{PREFILL},role="prefill",daemon="prefill-0/node-0",version="1"}}': "1x500",
    f'kvbridge_build_info{{{DECODE},role="decode",daemon="decode-0/node-0",version="1"}}': "1x500",
    f'kvbridge_build_info{{{BOOTSTRAP},role="bootstrap",daemon="bootstrap",version="1"}}': "1x500",
}
ON_PREFILL = {"job": "kvbridge", "instance": "p:7901", "daemon": "prefill-0/node-0"}
ON_DECODE = {"job": "kvbridge", "instance": "d:7902", "daemon": "decode-0/node-0"}
ON_BOOTSTRAP = {"job": "kvbridge", "instance": "b:7900"}

Series = Mapping[str, str]


@dataclass(frozen=True)
class Situation:
    """One alert. It is quiet at `quiet_s` and fires at `fires_s` on `series`; on `nearly` it never fires."""

    alert: str
    severity: str
    series: Series
    quiet_s: int
    fires_s: int
    labels: Mapping[str, str]
    summary: str
    nearly: Series = field(default_factory=dict)


def pages(space: str, **states: str) -> Series:
    """Pages of a space on decode, by state; none is cached."""
    available = {f'kvbridge_pages_available{{{DECODE},space="{space}"}}': states["free"]} if "free" in states else {}
    return available | {
        f'kvbridge_pool_pages{{{DECODE},space="{space}",state="{state}"}}': values for state, values in states.items()
    }


def slow_peer(bytes_a_step: int) -> Series:
    """Three prefill nodes that are busy 3 s of every 15; the third brings so much."""
    labels = [f'{DECODE},peer="prefill-{peer}/node-0",direction="received",transport="nixl"' for peer in range(3)]
    amounts = (3_000_000, 2_700_000, bytes_a_step)
    return {
        f"kvbridge_peer_transferred_bytes_total{{{label}}}": f"0+{amount}x100"
        for label, amount in zip(labels, amounts, strict=True)
    } | {f"kvbridge_peer_busy_seconds_total{{{label}}}": "0+3x100" for label in labels}


def evicted(*, unused: int, read_back: int) -> Series:
    """Pages that leave the host tier of decode, which has 1,000, by use: so many a step."""
    return {
        f'kvbridge_host_tier_evicted_pages_total{{{DECODE},use="unused"}}': f"0+{unused}x300",
        f'kvbridge_host_tier_evicted_pages_total{{{DECODE},use="read_back"}}': f"0+{read_back}x300",
        f'kvbridge_pool_pages{{{DECODE},space="full_twin",state="cached"}}': "1000x300",
    }


def prefetches(**a_step: int) -> Series:
    """Prompts that decode looks for in its store, by outcome: so many a step."""
    return {
        f'kvbridge_prefix_store_prefetches_total{{{DECODE},outcome="{outcome}"}}': f"0+{count}x300"
        for outcome, count in a_step.items()
    }


SITUATIONS = (
    Situation(
        "KvbridgeDaemonDown",
        "critical",
        {f"up{{{DECODE}}}": "1x3 0x20"},
        quiet_s=90,
        fires_s=120,
        labels=ON_BOOTSTRAP | {"instance": "d:7902"},
        summary="d:7902 does not answer",
        nearly={f"up{{{DECODE}}}": "1x3 0x2 1x20", 'up{job="node",instance="d:9100"}': "0x30"},
    ),
    Situation(
        "KvbridgeDaemonNotReady",
        "warning",
        {f"kvbridge_ready{{{PREFILL}}}": "1x3 0x20"},
        quiet_s=150,
        fires_s=180,
        labels=ON_PREFILL | {"role": "prefill"},
        summary="prefill prefill-0/node-0 (p:7901) admits no rooms",
        nearly={f"kvbridge_ready{{{PREFILL}}}": "1x3 0x7 1x20"},
    ),
    Situation(
        "KvbridgeNoPairPossible",
        "critical",
        {
            f'kvbridge_instances{{{BOOTSTRAP},role="prefill",state="ready"}}': "2x30",
            f'kvbridge_instances{{{BOOTSTRAP},role="decode",state="ready"}}': "1x3 0x30",
            f'kvbridge_instances{{{BOOTSTRAP},role="decode",state="not_ready"}}': "0x3 1x30",
        },
        quiet_s=90,
        fires_s=120,
        labels={"job": "kvbridge", "role": "decode"},
        summary="No decode instance is ready: no request can be paired",
        nearly={
            f'kvbridge_instances{{{BOOTSTRAP},role="decode",state="ready"}}': "1x40",
            f'kvbridge_instances{{{BOOTSTRAP},role="decode",state="not_ready"}}': "3x40",
        },
    ),
    Situation(
        "KvbridgeNotRegistered",
        "warning",
        {
            f'kvbridge_directory_registration{{{PREFILL},state="registered"}}': "1x3 0x20",
            f'kvbridge_directory_registration{{{PREFILL},state="unreachable"}}': "0x3 1x20",
            f'kvbridge_directory_registration{{{PREFILL},state="refused"}}': "0x30",
        },
        quiet_s=90,
        fires_s=120,
        labels=ON_PREFILL | {"state": "unreachable"},
        summary="prefill-0/node-0 (p:7901) is not in the directory: unreachable",
        nearly={
            f'kvbridge_directory_registration{{{PREFILL},state="none"}}': "1x30",
            f'kvbridge_directory_registration{{{PREFILL},state="unreachable"}}': "0x3 1x3 0x30",
        },
    ),
    Situation(
        "KvbridgePairingsRefused",
        "warning",
        {
            f'kvbridge_pairings_total{{{BOOTSTRAP},outcome="paired"}}': "0+10x100",
            f'kvbridge_pairings_total{{{BOOTSTRAP},outcome="capacity"}}': "0+5x100",
        },
        quiet_s=300,
        fires_s=420,
        labels=ON_BOOTSTRAP,
        summary="33.33% of the requests for a pair are refused by b:7900",
        nearly={
            f'kvbridge_pairings_total{{{BOOTSTRAP},outcome="paired"}}': "0+10x100",
            f'kvbridge_pairings_total{{{BOOTSTRAP},outcome="capacity"}}': "0+2x100",
        },
    ),
    Situation(
        "KvbridgeEngineMissing",
        "critical",
        {
            f'kvbridge_engines{{{DECODE},state="attached"}}': "1x3 0x20",
            f'kvbridge_engines{{{DECODE},state="gone"}}': "0x30",
            f'kvbridge_rooms{{{DECODE},state="committed"}}': "2x30",
        },
        quiet_s=90,
        fires_s=120,
        labels=ON_DECODE | {"role": "decode"},
        summary="Rooms wait on decode decode-0/node-0 and no engine is attached",
        nearly={
            f'kvbridge_engines{{{DECODE},state="attached"}}': "0x30",
            f'kvbridge_rooms{{{DECODE},state="committed"}}': "0x30",
            f'kvbridge_rooms{{{DECODE},state="completed"}}': "7x30",
        },
    ),
    Situation(
        "KvbridgeRoomsFailing",
        "critical",
        {
            f'kvbridge_rooms_ended_total{{{DECODE},state="completed",code=""}}': "0+9x100",
            f'kvbridge_rooms_ended_total{{{DECODE},state="failed",code="peer_failed"}}': "0x8 0+1x100",
        },
        quiet_s=180,
        fires_s=600,
        labels=ON_DECODE | {"role": "decode"},
        summary="10% of the rooms on decode decode-0/node-0 fail",
        nearly={
            # One in a hundred; and aborted ones, which somebody gave up.
            f'kvbridge_rooms_ended_total{{{DECODE},state="completed",code=""}}': "0+100x100",
            f'kvbridge_rooms_ended_total{{{DECODE},state="failed",code="peer_failed"}}': "0+1x100",
            f'kvbridge_rooms_ended_total{{{DECODE},state="aborted",code="aborted"}}': "0+50x100",
        },
    ),
    Situation(
        "KvbridgeRoomsTimeOut",
        "warning",
        {f'kvbridge_rooms_ended_by_limit_total{{{DECODE},limit="timeouts.claim_s"}}': "0x20 0+1x8 8x100"},
        quiet_s=300,
        fires_s=600,
        labels=ON_DECODE | {"limit": "timeouts.claim_s"},
        summary="Rooms on decode-0/node-0 end by timeouts.claim_s",
        nearly={f'kvbridge_rooms_ended_by_limit_total{{{DECODE},limit="timeouts.claim_s"}}': "0x20 0 1 2 2x100"},
    ),
    Situation(
        "KvbridgeDigestMismatch",
        "critical",
        {f'kvbridge_digest_mismatches_total{{{DECODE},component="c4"}}': "_x8 1x100"},
        quiet_s=105,
        fires_s=135,
        labels=ON_DECODE | {"component": "c4"},
        summary="Bytes of c4 arrived at decode-0/node-0 other than they were sent",
        # It was a quarter of an hour ago, and has not come again.
        nearly={f'kvbridge_digest_mismatches_total{{{DECODE},component="c4"}}': "0x100"},
    ),
    Situation(
        "KvbridgeClaimsLate",
        "warning",
        {
            f'kvbridge_phase_duration_seconds_bucket{{{DECODE},phase="commit_to_claim",le="5"}}': "0x100",
            f'kvbridge_phase_duration_seconds_bucket{{{DECODE},phase="commit_to_claim",le="10"}}': "0+4x100",
            f'kvbridge_phase_duration_seconds_bucket{{{DECODE},phase="commit_to_claim",le="+Inf"}}': "0+4x100",
        },
        quiet_s=300,
        fires_s=420,
        labels=ON_DECODE | {"phase": "commit_to_claim"},
        summary="Rooms wait 9.95s (p99) on decode-0/node-0 until the decode engine claims them",
        nearly={
            f'kvbridge_phase_duration_seconds_bucket{{{DECODE},phase="commit_to_claim",le="5"}}': "0+4x100",
            f'kvbridge_phase_duration_seconds_bucket{{{DECODE},phase="commit_to_claim",le="+Inf"}}': "0+4x100",
            f'kvbridge_phase_duration_seconds_bucket{{{DECODE},phase="claim_to_release",le="5"}}': "0x100",
            f'kvbridge_phase_duration_seconds_bucket{{{DECODE},phase="claim_to_release",le="+Inf"}}': "0+4x100",
        },
    ),
    Situation(
        "KvbridgePagesQuarantined",
        "warning",
        pages("full", quarantined="0x3 4x40", free="96x3 92x40"),
        quiet_s=330,
        fires_s=375,
        labels=ON_DECODE | {"space": "full"},
        summary="4 pages of full on decode-0/node-0 stay in quarantine",
        nearly=pages("full", quarantined="0x3 4x15 0x40", free="96x40"),
    ),
    Situation(
        "KvbridgeQuarantineLarge",
        "critical",
        pages("full", quarantined="0x3 30x40", free="100x3 70x40"),
        quiet_s=150,
        fires_s=195,
        labels=ON_DECODE | {"space": "full"},
        summary="30% of full on decode-0/node-0 is in quarantine",
        nearly=pages("full", quarantined="19x40", free="81x40"),
    ),
    Situation(
        "KvbridgePoolNearlyFull",
        "warning",
        pages("swa", held="50x3 97x60", free="50x3 3x60", leased="0x60"),
        quiet_s=630,
        fires_s=675,
        labels=ON_DECODE | {"space": "swa"},
        summary="3% of swa on decode-0/node-0 is available",
        nearly=pages("swa", held="94x60", free="6x60"),
    ),
    Situation(
        "KvbridgeStarved",
        "warning",
        {f"kvbridge_admission_starved_seconds{{{DECODE}}}": "0x3 0+15x40"},
        quiet_s=90,
        fires_s=180,
        labels=ON_DECODE,
        summary="Not even the smallest request has fitted on decode-0/node-0 for 2m 0s",
        nearly={f"kvbridge_admission_starved_seconds{{{DECODE}}}": "0x3 5 20 0 9 24 0x20"},
    ),
    Situation(
        "KvbridgeAdmissionsRefused",
        "warning",
        {
            f'kvbridge_admissions_refused_total{{{DECODE},code="capacity"}}': "0+5x100",
            f'kvbridge_admissions_refused_total{{{DECODE},code="queue_full"}}': "0x100",
            f'kvbridge_rooms_ended_total{{{DECODE},state="completed",code=""}}': "0+10x100",
        },
        quiet_s=300,
        fires_s=420,
        labels=ON_DECODE,
        summary="decode-0/node-0 refuses 33.33% of its requests for want of pages",
        nearly={
            # What a client did wrong is no want of pages.
            f'kvbridge_admissions_refused_total{{{DECODE},code="capacity"}}': "0+2x100",
            f'kvbridge_admissions_refused_total{{{DECODE},code="invalid_input"}}': "0+50x100",
            f'kvbridge_rooms_ended_total{{{DECODE},state="completed",code=""}}': "0+10x100",
        },
    ),
    Situation(
        "KvbridgePeerUnstable",
        "warning",
        {f'kvbridge_peer_failures_total{{{DECODE},peer="prefill-0/node-0",code="lost"}}': "0x10 1x10 2x10 3x60"},
        quiet_s=285,
        fires_s=480,
        labels=ON_DECODE | {"peer": "prefill-0/node-0"},
        summary="decode-0/node-0 keeps losing prefill-0/node-0",
        nearly={
            f'kvbridge_peer_failures_total{{{DECODE},peer="prefill-0/node-0",code="lost"}}': "0x10 1x60",
            f'kvbridge_peer_failures_total{{{DECODE},peer="prefill-0/node-0",code="aborted"}}': "0+3x60",
        },
    ),
    Situation(
        "KvbridgePeerSlow",
        "warning",
        slow_peer(300_000),
        quiet_s=600,
        fires_s=660,
        labels={
            "job": "kvbridge",
            "instance": "d:7902",
            "peer": "prefill-2/node-0",
            "direction": "received",
            "transport": "nixl",
        },
        summary="prefill-2/node-0 is slow: 97.66kiB/s received over nixl",
        nearly=slow_peer(1_000_000),
    ),
    Situation(
        "KvbridgeWritersShutOut",
        "warning",
        {f"kvbridge_endpoint_epoch{{{DECODE}}}": "1x10 2x10 3x10 4x60"},
        quiet_s=285,
        fires_s=480,
        labels=ON_DECODE,
        summary="decode-0/node-0 has shut writers out again and again",
        nearly={f"kvbridge_endpoint_epoch{{{DECODE}}}": "1x10 2x100"},
    ),
    Situation(
        "KvbridgeFramesRefused",
        "warning",
        {f'kvbridge_control_frames_refused_total{{{PREFILL},reason="malformed"}}': "0+6x60"},
        quiet_s=120,
        fires_s=240,
        labels=ON_PREFILL | {"reason": "malformed"},
        summary="prefill-0/node-0 refuses control frames: malformed",
        nearly={f'kvbridge_control_frames_refused_total{{{PREFILL},reason="malformed"}}': "0+1x60"},
    ),
    Situation(
        "KvbridgeWorkerDied",
        "warning",
        {
            f'kvbridge_worker_restarts_total{{{PREFILL},reason="killed"}}': "0x10 1x100",
            f'kvbridge_worker_restarts_total{{{PREFILL},reason="exited"}}': "0x100",
        },
        quiet_s=150,
        fires_s=180,
        labels=ON_PREFILL | {"reason": "killed"},
        summary="A rank worker of prefill-0/node-0 died: killed",
        nearly={f'kvbridge_worker_restarts_total{{{PREFILL},reason="killed"}}': "4x100"},
    ),
    Situation(
        "KvbridgeStoreFailing",
        "critical",
        {
            f'kvbridge_store_failures_total{{{BOOTSTRAP},reason="timeout"}}': "0x10 0+2x100",
            f'kvbridge_store_failures_total{{{BOOTSTRAP},reason="connection"}}': "0x100",
        },
        quiet_s=180,
        fires_s=300,
        labels=ON_BOOTSTRAP | {"reason": "timeout"},
        summary="The directory's store fails for b:7900: timeout",
        nearly={f'kvbridge_store_failures_total{{{BOOTSTRAP},reason="timeout"}}': "3x100"},
    ),
    Situation(
        "KvbridgeStoreValuesRefused",
        "warning",
        {f'kvbridge_store_values_refused_total{{{BOOTSTRAP},reason="node"}}': "0x10 1x100"},
        quiet_s=150,
        fires_s=180,
        labels=ON_BOOTSTRAP | {"reason": "node"},
        summary="b:7900 found malformed values in the directory's store: node",
        nearly={f'kvbridge_store_values_refused_total{{{BOOTSTRAP},reason="node"}}': "2x100"},
    ),
    Situation(
        "KvbridgeInternalErrors",
        "warning",
        {f'kvbridge_http_requests_total{{{DECODE},route="/status",method="GET",code="500"}}': "_x10 1x100"},
        quiet_s=135,
        fires_s=180,
        labels=ON_DECODE | {"route": "/status"},
        summary="decode-0/node-0 answered 500 to /status",
        nearly={f'kvbridge_http_requests_total{{{DECODE},route="/ready",method="GET",code="503"}}': "0+5x100"},
    ),
    Situation(
        "KvbridgeFilesNearlyExhausted",
        "warning",
        {f"process_open_fds{{{DECODE}}}": "100x3 900x40", f"process_max_fds{{{DECODE}}}": "1024x50"},
        quiet_s=330,
        fires_s=375,
        labels=ON_DECODE,
        summary="decode-0/node-0 has 87.89% of its files open",
        nearly={f"process_open_fds{{{DECODE}}}": "800x60", f"process_max_fds{{{DECODE}}}": "1024x60"},
    ),
    Situation(
        "KvbridgeVersionsDiffer",
        "info",
        {
            'kvbridge_build_info{job="kvbridge",instance="e:7902",role="decode",daemon="decode-1/node-0",version="2"}': "1x300"
        },
        quiet_s=3585,
        fires_s=3660,
        labels={"job": "kvbridge"},
        summary="2 versions of kvbridge run in kvbridge",
        nearly={
            'kvbridge_build_info{job="kvbridge",instance="e:7902",role="decode",daemon="decode-1/node-0",version="2"}': "1x150"
        },
    ),
    Situation(
        "KvbridgeBackupsFailing",
        "warning",
        {
            f'kvbridge_host_tier_copies_total{{{PREFILL},direction="backup",outcome="done"}}': "0+5x100",
            f'kvbridge_host_tier_copies_total{{{PREFILL},direction="backup",outcome="deadline"}}': "0x10 1x100",
        },
        quiet_s=150,
        fires_s=180,
        labels=ON_PREFILL | {"outcome": "deadline"},
        summary="Copies to host memory fail on prefill-0/node-0: deadline",
        nearly={
            # A worker that dies is told by KvbridgeWorkerDied.
            f'kvbridge_host_tier_copies_total{{{PREFILL},direction="backup",outcome="worker_gone"}}': "0x10 1x100",
            f'kvbridge_host_tier_copies_total{{{PREFILL},direction="backup",outcome="deadline"}}': "3x100",
        },
    ),
    Situation(
        "KvbridgeLoadBacksFailing",
        "critical",
        {f'kvbridge_host_tier_copies_total{{{DECODE},direction="load_back",outcome="transport_failed"}}': "0x10 1x100"},
        quiet_s=150,
        fires_s=180,
        labels=ON_DECODE,
        summary="Engines of decode-0/node-0 cannot load prefixes back from host memory",
        nearly={
            f'kvbridge_host_tier_copies_total{{{DECODE},direction="load_back",outcome="done"}}': "0+5x100",
            f'kvbridge_host_tier_copies_total{{{DECODE},direction="load_back",outcome="transport_failed"}}': "2x100",
        },
    ),
    Situation(
        "KvbridgeHostTierUnused",
        "info",
        evicted(unused=98, read_back=2),
        quiet_s=1800,
        fires_s=1860,
        labels=ON_DECODE,
        summary="98% of the pages that left host memory on decode-0/node-0 were never read back",
        # A tenth comes back; and a few pages of a pool that is hardly used.
        nearly=evicted(unused=90, read_back=10)
        | {
            f'kvbridge_host_tier_evicted_pages_total{{{PREFILL},use="unused"}}': "0x100 50x200",
            f'kvbridge_pool_pages{{{PREFILL},space="full_twin",state="free"}}': "1000x300",
        },
    ),
    Situation(
        "KvbridgePrefixStoreAway",
        "warning",
        {
            f'kvbridge_prefix_store_state{{{DECODE},state="closed"}}': "1x3 0x60",
            f'kvbridge_prefix_store_state{{{DECODE},state="open"}}': "0x3 1 1 1 0 1 1 1 0 1x60",
            f'kvbridge_prefix_store_state{{{DECODE},state="half_open"}}': "0x3 0 0 0 1 0 0 0 1 0x60",
        },
        quiet_s=390,
        fires_s=780,
        labels=ON_DECODE,
        summary="decode-0/node-0 goes without its store: 100% of the last ten minutes",
        # Without a store all are 0; a start takes a while; and a store that fails now and then comes back.
        nearly={
            f'kvbridge_prefix_store_state{{{PREFILL},state="open"}}': "0x300",
            f'kvbridge_prefix_store_state{{{DECODE},state="starting"}}': "1x8 0x300",
            f'kvbridge_prefix_store_state{{{DECODE},state="open"}}': "0x30 1x8 0x60 1x8 0x100",
        },
    ),
    Situation(
        "KvbridgeStoreProcessDying",
        "warning",
        {f"kvbridge_store_process_starts_total{{{DECODE}}}": "1x10 2x3 3x3 4x100"},
        quiet_s=210,
        fires_s=300,
        labels=ON_DECODE,
        summary="The process of decode-0/node-0 that uses its store ends again and again",
        nearly={f"kvbridge_store_process_starts_total{{{DECODE}}}": "1x10 2x20 3x100 4x100"},
    ),
    Situation(
        "KvbridgeStorePoisoned",
        "critical",
        {f'kvbridge_prefix_store_objects_total{{{DECODE},verb="get",outcome="wrong_digest"}}': "0x10 1x100"},
        quiet_s=150,
        fires_s=180,
        labels=ON_DECODE | {"outcome": "wrong_digest"},
        summary="decode-0/node-0 got objects from its store that are not what was stored there: wrong_digest",
        # Misses; what another release has written; and what was told an hour ago.
        nearly={
            f'kvbridge_prefix_store_objects_total{{{DECODE},verb="get",outcome="absent"}}': "0+7x300",
            f'kvbridge_prefix_store_objects_total{{{DECODE},verb="get",outcome="other_version"}}': "0+7x300",
            f'kvbridge_prefix_store_objects_total{{{DECODE},verb="get",outcome="short"}}': "4x300",
        },
    ),
    Situation(
        "KvbridgePrefetchesLate",
        "warning",
        prefetches(found=2, late=6, nothing=20),
        quiet_s=300,
        fires_s=420,
        labels=ON_DECODE,
        summary="75% of what decode-0/node-0 looks for in its store does not come in time",
        nearly=prefetches(found=6, late=2, nothing=20),
    ),
    Situation(
        "KvbridgePrefixStoreNotWritten",
        "warning",
        {
            f'kvbridge_prefix_store_objects_total{{{DECODE},verb="put",outcome="stored"}}': "0+1x300",
            f'kvbridge_prefix_store_objects_total{{{DECODE},verb="put",outcome="full"}}': "0x10 0+9x300",
        },
        quiet_s=1020,
        fires_s=1500,
        labels=ON_DECODE,
        summary="90% of what decode-0/node-0 writes to its store is not taken",
        nearly={
            f'kvbridge_prefix_store_objects_total{{{DECODE},verb="put",outcome="stored"}}': "0+9x300",
            f'kvbridge_prefix_store_objects_total{{{DECODE},verb="put",outcome="full"}}': "0+1x300",
        },
    ),
)
