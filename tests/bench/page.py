"""The figures of `docs/performance.md`, from the committed results: `python -m tests.bench.page` writes them between their marks.

Owns: which figures the page shows, and their place there. Must not know: how they were measured, what the page says of them. A test
compares, so the page cannot say anything else than the files.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench import bench_layouts, bench_paths
from tests.bench.gpu import report
from tests.bench.gpu.sparse_figures import sparse_section
from tests.bench.gpu.tables import Table, markdown, number, part_tables
from tests.bench.peers.figures import section as beside_sglang
from tests.bench.vllm.figures import section as beside_nixl

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
Results = dict[str, Any]


def main() -> int:
    """Write every section."""
    PAGE.write_text(written(PAGE.read_text()))
    return 0


def written(document: str) -> str:
    """The page with each section's figures as its file has them, or that there is none. Raises ValueError without its place."""
    for name, (file, build) in SECTIONS.items():
        found = RESULTS / file
        text = build(json.loads(found.read_text())) if found.exists() else f"Not measured yet (`{file}`)."
        document = placed(document, name, text)
    return document


def placed(document: str, name: str, text: str) -> str:
    """The document with one section between its marks replaced. Raises ValueError when it has no marks."""
    begin, end = f"<!-- figures of {name} begin -->", f"<!-- figures of {name} end -->"
    pattern = f"{re.escape(begin)}\n.*?{re.escape(end)}"
    if not re.search(pattern, document, re.DOTALL):
        raise ValueError(f"the document has no section between {begin!r} and {end!r}")
    return re.sub(pattern, lambda _: f"{begin}\n{text}\n{end}", document, flags=re.DOTALL)


# ---------------------------------------------------------------------------------------------- one host


NAMES = {
    "mooncake": "Mooncake, TCP",
    "nixl": "NIXL over UCX, TCP",
    "nixl-shm": "NIXL over UCX, shared memory",
    "local": "local, shared memory",
}


def transports(results: Results) -> str:
    """Rates and their ratios, by size of an operation."""
    return f"{_machine(results)}\n\n{_rates(results['transport'])}"


def _rates(results: Results) -> str:
    rows = []
    for case in results["cases"]:
        ours, *theirs = [*map(median, case["gb_s"].values())]
        spread = f"{min(case['ratios']):.2f} - {max(case['ratios']):.2f}"
        rows.append(
            (
                NAMES[case["backend"]],
                f"{case['operation_bytes']:,}",
                number(ours),
                number(max(theirs)),
                f"{case['ratio']:.2f}",
                spread,
            )
        )
    headings = (
        "transport",
        "operation B",
        "GB/s",
        "bare library GB/s",
        "ratio",
        f"of {results['turns']} turns",
    )
    return markdown(Table("", headings, tuple(rows)))


WAYS = {
    "mooncake over rdma, batches": "Mooncake over RDMA, in batches",
    "mooncake over tcp, each by itself": "Mooncake over TCP, each by itself",
    "nixl, requests of many": "NIXL, in requests of many",
}


def operations(results: Results) -> str:
    """What an operation costs above the libraries."""
    found = results["operations"]
    before, after = found["load"]
    rows = tuple(
        (
            WAYS[case["way"]],
            f"{median(case['us']):.2f}",
            f"{min(case['us']):.2f} - {max(case['us']):.2f}",
            f"{median(case['bare_us']):.2f}",
            f"{case['budget_us']:g}",
        )
        for case in found["processor"]["cases"]
    )
    headings = (
        "an operation",
        "us of processor time",
        f"of {found['processor']['turns']} turns",
        "bare loop us",
        "budget us",
    )
    return (
        f"{_machine(results)} Load average {before:.1f} before, {after:.1f} after.\n\n{markdown(Table('', headings, rows))}\n\n"
        f"{_rates(found['transfers'])}\n\nBudget of the ratios: {found['transfers']['budget']:g}."
    )


def layouts(results: Results) -> str:
    """How many operations a request takes in either layout, and how long a short one takes."""
    found = results["layouts"]
    before, after = found["load"]
    counted = tuple(
        (
            f"`{case['layout']}`",
            f"{case['tokens']:,}",
            case["pool"],
            *(
                text
                for name in ("live", "dead")
                for text in (f"{case[name]['operations']:,}", f"{case[name]['bytes'] / 1e6:,.2f}")
            ),
            f"{case['budget'] or '-'}",
        )
        for case in found["operations"]
    )
    timed, rows = found["requests"], []
    against = bench_layouts.ratios(timed, "http_admit_to_claim_ms")
    for way, each in timed["ways"].items():
        claimed, moved = each["http_admit_to_claim_ms"], each["offer_to_commit_ms"]
        ratio = f"{median(against[way]):.2f}" if way in against else "-"
        rows.append(
            (way, f"{median(claimed):.1f}", f"{min(claimed):.1f} - {max(claimed):.1f}", f"{median(moved):.1f}", ratio)
        )
    operations = ("pools", "tokens", "pages", "live rows", "MB", "with dead bytes", "MB", "budget")
    times = ("pools", "admission to claim ms", f"of {timed['requests']}", "offer to commit ms", "ratio")
    return (
        f"{_machine(results)} Load average {before:.1f} before, {after:.1f} after.\n\n"
        f"{markdown(Table('', operations, counted))}\n\n{markdown(Table('', times, tuple(rows)))}"
    )


def plans(results: Results) -> str:
    """How long it takes to turn a publication into operations."""
    rows = tuple(
        (
            f"DeepSeek-V4-{case['model'].title()}",
            f"{case['tokens']:,}",
            case["pool"],
            f"{case['operations']:,}",
            f"{case['bytes'] / 1e6:,.0f}",
            f"{case['median_ms']:.2f}",
            f"{case['budget_ms']:g}" if case["budget_ms"] else "-",
        )
        for case in results["plan"]["cases"]
        if case["tokens"] != 131_072
    )
    return markdown(Table("", ("model", "tokens", "pool", "operations", "MB", "ms", "budget ms"), rows))


def overheads(results: Results) -> str:
    """What a request costs beside its bytes."""
    measures = ("offer_to_first_byte_ms", "offer_to_commit_ms", "http_admit_to_claim_ms")
    rows = tuple(
        (NAMES[name], *(f"{found[each]['median']:.1f} ({found[each]['p99']:.1f})" for each in measures))
        for name, found in results["overhead"].items()
    )
    return markdown(Table("", ("transport", *(each.removesuffix("_ms").replace("_", " ") for each in measures)), rows))


def peers(results: Results) -> str:
    """Requests beside SGLang's own sender and receiver."""
    return f"{_machine(results)} {beside_sglang(results)}"


def vllm(results: Results) -> str:
    """vLLM with kvbridge beside vLLM with NixlConnector."""
    return f"{_machine(results)} {beside_nixl(results)}"


def paths(results: Results) -> str:
    """A path lost in the middle of a request, against the same undisturbed."""
    return f"{_machine(results)}\n\n{bench_paths.table(results['paths'])}"


def loads(results: Results) -> str:
    """Rooms a second, and what happens at twice of what is possible."""
    words = {"bootstrap": "bootstrap", "daemons": "both daemons", "engine": "the engine"}
    rows = []
    for way, found in results["load"]["ways"].items():
        over, after = found["overload"], found["after_overload"]
        best = max(found["levels"], key=lambda level: level["rooms_s"])
        rows.append(
            (
                words[way],
                number(found["best_rooms_s"]),
                f"{1000 * sum(best['cpu'].values()) / best['rooms_s']:.1f}",
                number(over["offered_s"]),
                number(over["rooms_s"]),
                f"{100 * over['refused_share']:.0f} %",
                str(sum(over["lost"].values())),
                f"{over['backlog_drained_s']:.1f}",
                number(after["rooms_s"]),
            )
        )
    headings = (
        "admitted by",
        "rooms/s",
        "processor ms a room",
        "offered/s",
        "served/s",
        "answered 503",
        "lost",
        "backlog gone after s",
        "rooms/s then",
    )
    return f"{_machine(results)}\n\n{markdown(Table('', headings, tuple(rows)))}"


def digests(results: Results) -> str:
    """What computing them takes on one core, and what they add to a commit."""
    found = results["digest"]
    compute = tuple(
        (f"{case['tokens']:,}", *(number(case["gb_s"][each]) for each in ("digest", "crc32c", "copy")))
        for case in found["compute"]
    )
    commit = tuple(
        (
            NAMES[case["transport"]],
            f"{case['tokens']:,}",
            *(f"{case['commit_ms'][each]:.1f}" for each in ("none", "crc32c")),
        )
        for case in found["end_to_end"]
    )
    first = markdown(Table("", ("tokens", "digests GB/s", "one CRC-32C over all GB/s", "memcpy GB/s"), compute))
    return f"{first}\n\n{markdown(Table('', ('transport', 'tokens', 'offer to commit ms', 'with digests ms'), commit))}"


def directories(results: Results) -> str:
    """Pairings a second, by where the directory is."""
    found = results["directory"]
    rows = tuple(
        (
            name,
            number(case["per_s"]),
            f"{case['cpu_us']:.0f}",
            f"{case['alone_median_ms']:.2f} ({case['alone_p99_ms']:.2f})",
        )
        for name, case in found.items()
        if name not in {"prefixes", "heartbeats"}
    )
    beats = found["heartbeats"]
    said = (
        f"{beats['instances']:,} nodes: {beats['registration_us']:,.0f} us of bootstrap's processor time for a registration, "
        f"{beats['heartbeat_us']:,.0f} us for a heartbeat, over HTTP, and {beats['idle_cores']:.1%} of a core without any."
    )
    table = Table("", ("directory", "pairings/s", "processor us for each", "one alone ms"), rows)
    return f"{_machine(results)}\n\n{markdown(table)}\n\n{said}"


def fleets(results: Results) -> str:
    """A large fleet on virtual time, by how pairs are chosen."""
    headings = ("looked at", "told", "deaths and restarts", "refused", "though a pair had place", "asked in vain")
    rows = tuple(
        (
            "all" if case["drawn"] == "all" else f"{case['drawn']} of each role",
            "at once" if case["fresh"] else "by heartbeats",
            "yes" if case["failures"] else "no",
            f"{case['refused_full'] + case['refused_needlessly']:.2%}",
            f"{case['refused_needlessly']:.2%}",
            f"{case['asked_in_vain']:.2%}",
            f"{case['wait_mean_s'] * 1e3:.0f} ({case['wait_p99_s'] * 1e3:.0f})",
            f"{case['prefill_deviation']:.3f}, {case['decode_deviation']:.3f}",
            f"{case['beats_s']:,.0f}",
        )
        for case in results["cases"]
    )
    said = (
        f"{results['instances']:,} instances, {results['requests_s']:,.0f} requests a second "
        f"({results['trace'] or 'made up'}), {results['seconds']:g} s of virtual time."
    )
    more = ("prefill wait ms", "deviation of the share in use, prefill, decode", "heartbeats/s")
    return f"{said}\n\n{markdown(Table('', (*headings, *more), rows))}"


def soak(results: Results) -> str:
    """What very many rooms leave behind."""
    first, last = results["looks"][0], results["looks"][-1]
    rows = tuple(
        (
            name,
            f"{before['uss_mib']:.1f} -> {after['uss_mib']:.1f}",
            f"{100 * (after['uss_mib'] / before['uss_mib'] - 1):+.1f} %",
            *(f"{before[each]} -> {after[each]}" for each in ("fds", "sockets", "threads", "mappings")),
        )
        for name, before, after in (
            (name, first["processes"][name], last["processes"][name]) for name in first["processes"]
        )
    )
    rate = results["rooms"] / results["seconds"]
    line = (
        f"{results['rooms']:,} rooms of {results['tokens']} tokens "
        f"({results['payload_bytes'] / 1e9:.1f} GB, `{results['transport']}`), "
        f"{results['rooms_compared']:,} of them compared byte for byte, in {results['seconds']:.0f} s on {results['cores']} cores: "
        f"{rate:.0f} rooms/s, {len(results['lost'])} lost. From {first['rooms']:,} rooms to {last['rooms']:,}:"
    )
    headings = ("process", "memory of its own MiB", "growth", "descriptors", "sockets", "threads", "mappings")
    return f"{line}\n\n{markdown(Table('', headings, rows))}"


WORK = {
    "match_pin_512": "match and pin 131,072 tokens",
    "match_pin_4096": "match and pin 1,048,576 tokens",
    "insert_512": "insert 131,072 tokens",
    "evict_1000": "evict 1,000 pages",
}


def prefixes(results: Results) -> str:
    """What the index of cached prefixes takes on one core."""
    found = results["prefix"]
    rows = tuple(
        (
            WORK[name],
            *(f"{index['cases'][name]['median_ms']:.2f}" for index in found["indexes"]),
            f"{case['budget_ms']:g}",
        )
        for name, case in found["indexes"][0]["cases"].items()
    )
    line = (
        f"Keys of 1,048,576 tokens take {found['keys_of_1m_tokens']['median_ms']:.1f} ms, a page takes "
        f"{found['page_bytes']:.0f} B of memory (budget {found['page_bytes_budget']} B)."
    )
    columns = tuple(f"{index['numbers']}, ms" for index in found["indexes"])
    return f"{markdown(Table('', ('an index of 1M pages', *columns, 'budget ms'), rows))}\n\n{line}"


POLICIES = {"lru": "least recently used", "greedy_dual": "by size, age and uses"}


def kept(results: Results) -> str:
    """How much of a trace pools of prefixes would hold."""
    rows = tuple(
        (
            " + ".join(f"{pool[size] / 2**30:g} GiB" for size in ("pool_bytes", "host_bytes") if pool[size])
            or "endless",
            POLICIES[pool["policy"]],
            f"{100 * pool['hit_rate']:.2f} %",
            f"{100 * pool['host_hit_tokens'] / pool['hit_tokens']:.0f} %" if pool["host_bytes"] else "",
            number(pool["pages_in_a_run"]) if pool["pages_in_a_run"] else "",
        )
        for pool in results["pools"]
    )
    line = (
        f"{results['requests']:,} requests of `{results['trace']}` ({results['prompt_tokens']:,} tokens, {results['model']}) "
        f"through the index in {results['seconds']:.0f} s on one core."
    )
    columns = ("pool", "evicted first", "prompt tokens found", "of these, loaded back", "pages in a run given out")
    return f"{line}\n\n{markdown(Table('', columns, rows))}"


def used(results: Results) -> str:
    """What becomes of transfers when pools have long been full."""
    found = results["used_pools"]
    rows = tuple(
        (
            NAMES[case["backend"]],
            f"{case['chunk_tokens']:,}" if case["chunk_tokens"] < 1 << 30 else "all at once",
            f"{case['pages_in_a_run']['empty']:.1f}",
            f"{case['pages_in_a_run']['used']:.1f}",
            f"{case['busy_ratio']:.2f}",
            f"{min(case['busy_ratios']):.2f} - {max(case['busy_ratios']):.2f}",
            f"{case['ratio']:.2f}",
        )
        for case in found["cases"]
    )
    headings = (
        "transport",
        "tokens published at a time",
        "pages in a run, empty",
        "used",
        "bytes a processor second, used / empty",
        f"of {found['turns']} turns",
        "bytes a second",
    )
    line = (
        f"{found['requests']} requests of `{found['trace']}` between pools of {found['pages']:,} pages that had been full for "
        f"{found['settled']:,} requests, and between empty ones."
    )
    return f"{line}\n\n{markdown(Table('', headings, rows))}"


def shared(results: Results) -> str:
    """What keys cost a room, and what a prompt takes that is held but for its end."""
    rooms, long = results["shared_rooms"]["rooms"], results["shared_rooms"]["long_prompt"]
    rates = Table(
        "",
        ("rooms of 64 tokens of their own", "rooms/s", "processor time of both daemons a room, ms"),
        tuple(
            (what, f"{rooms[name]['rooms_s']:.0f}", f"{rooms[name]['daemons_cpu_ms']:.2f}")
            for name, what in (
                ("off", "without keys"),
                ("on", f"with keys, behind {rooms['held_tokens']} cached tokens"),
            )
        ),
    )
    tokens = long["tokens"]
    prompts = {
        "short": f"{tokens['short']:,} tokens, none held",
        "long": f"{tokens['long']:,} tokens, {tokens['held']:,} held",
    }
    times = Table(
        "",
        ("prompt of DeepSeek-V4-Flash", "offer to commit, median ms", "best ms"),
        tuple(
            (what, f"{long[name]['median_ms']:.1f}", f"{long[name]['best_ms']:.1f}") for name, what in prompts.items()
        ),
    )
    return (
        f"{markdown(rates)}\n\nRatios: {rooms['rate_ratio']:.2f} of the rooms (budget {rooms['budget']}), "
        f"{rooms['cpu_ratio']:.2f} in processor time.\n\n{markdown(times)}\n\n"
        f"Ratio: {long['ratio']:.2f} (budget {long['budget']})."
    )


def restarted(results: Results) -> str:
    """A daemon that was killed, until its first prompt, with kept pools and without."""
    found = results["warm_restart"]
    seconds = {name: f"{median(found[name]):.1f}" for name in ("warm_s", "empty_s", "restored_s")}
    turns = len(found["warm_s"])
    told = f"medians of {turns} turns" if turns > 1 else "one turn"
    return (
        f"{found['restored_pages']:,} pages in {found['size_gib']:g} GiB: {seconds['warm_s']} s from SIGKILL to the first prompt "
        f"from the host, {seconds['empty_s']} s to the first prompt of a daemon that found nothing; "
        f"{told}. {found['added_s']:+.1f} s (budget +{found['budget_s']:g} s). All pages were compared "
        f"{seconds['restored_s']} s after the pools were there, {found['lost']} were lost."
    )


def stores(results: Results) -> str:
    """Stores against what is below them, by the wall's clock and by the processor's."""
    found = results["store"]
    budgets, rows = found["budgets"], []
    for case in found["cases"]:
        for clock in ("wall", "processor"):
            figures = case[clock]
            budget = budgets[case["kind"]]
            for way, rate, against, ratio, wanted in (
                ("put", "put", "bare put", "put_of_bare", budget),
                ("get", "get", "bare get", "get_of_bare", budget),
                (
                    "get, of one without digests",
                    "get",
                    "get without digests",
                    "get_of_without_digests",
                    budgets["digests"],
                ),
            ):
                rates = figures["gb_s"]
                rows.append(
                    (
                        f"{case['kind']}: {way}",
                        clock,
                        number(rates[rate]),
                        number(rates[against]),
                        f"{figures[ratio]:.2f}",
                        f"{wanted:g}",
                    )
                )
    headings = ("what", "time", "GB/s", "peer GB/s", "ratio", "budget")
    what = f"{found['batch']} objects of {found['object_bytes']:,} bytes, medians of {found['turns']} turns"
    return f"{markdown(Table('', headings, tuple(rows)))}\n\n{what}; load of the two cores before: {found['load']:.1f}."


def twins(results: Results) -> str:
    """Backups and load-backs on the processor, against plain copies of the same pieces."""
    found = results["twin_copies"]
    headings = ("host", "device", "way", "pages", "MB", "GB/s", "memmove GB/s", "ratio", "by processor time")
    rows = []
    for case in found["cases"]:
        pages = f"{case['pages']} {'checkpoints' if case['space'] == 'swa' else 'pages'}"
        rates = number(case["gb_s"]["copier"]), number(case["gb_s"]["memmove"])
        ratios = f"{case['ratio']:.2f}", f"{case['busy']:.2f}"
        way = case["direction"].replace("_", "-")
        rows.append(
            (case["host_layout"], case["device_layout"], way, pages, f"{case['bytes'] / 1e6:.0f}", *rates, *ratios)
        )
    told = f"Budget {found['budget']}; {found['bytes_a_token']:,.0f} host bytes a token."
    return f"{markdown(Table('', headings, tuple(rows)))}\n\n{told}"


def reused(results: Results) -> str:
    """A trace through one pair whose prompts share pages."""
    settings = results["settings"]
    held = {
        name: f"{100 * tokens / results['arrived_tokens']:.2f} %" for name, tokens in results["found_tokens"].items()
    }
    pools = "pools that hold all of it"
    if on_host := settings.get("host_tokens"):
        pools = f"pools of {settings['pool_tokens']:,} tokens above a host tier of {on_host:,}"
        held |= {role: f"{held[role]} (loaded back: {held[f'{role}_host']})" for role in ("decode", "prefill")}
    sent = sum(amount["bytes"] for amount in results["amounts"].values())
    return (
        f"{results['completed']:,} of {results['requests']:,} requests of `{results['trace']}` (geometry of {settings['model']}, "
        f"{settings['max_in_flight']} at a time, {pools}) over {NAMES[settings['transport']]}: "
        f"{sent / 1e9:.3f} GB sent of {results['whole_bytes'] / 1e9:.3f} GB without prefixes "
        f"({sent / results['whole_bytes']:.3f}), {results['checked_bytes'] / 1e9:.3f} GB compared, "
        f"{results['mismatched_bytes']} bytes wrong. Of all prompt tokens decode held {held['decode']}, "
        f"prefill {held['prefill']}; a cache that forgets nothing would have held {held['endless']}."
    )


PHASES = (
    "admission",
    "engine_queue",
    "prefill",
    "offer_to_order",
    "plan",
    "first_byte",
    "move",
    "after_prefill",
    "commit_to_claim",
    "total",
)


def replays(results: Results) -> str:
    """A trace through one pair."""
    seconds, settings, machine = results["seconds"]["replay"], results["settings"], results["environment"]
    line = (
        f"{results['requests']} requests of `{results['trace']}` ({results['prompt_tokens']:,} tokens, geometry of "
        f"{settings['model']}) over {NAMES[settings['transport']]} on {machine['cores']} cores ({machine['cpu']}): "
        f"{results['completed']} served, {results['failed']} failed, {results['checked_bytes'] / 1e9:.1f} GB compared, "
        f"{results['mismatched_bytes']} bytes wrong, in {seconds:.0f} s ({results['completed'] / seconds:.1f} requests/s, every "
        "byte written and compared by the same two cores)."
    )
    rows = tuple(
        (
            name.replace("_", " "),
            *(f"{1000 * results['phases'][name][each]:.1f}" for each in ("p50_s", "p90_s", "p99_s")),
        )
        for name in PHASES
    )
    return f"{line}\n\n{markdown(Table('', ('phase, ms', 'p50', 'p90', 'p99'), rows))}"


def _machine(results: Results) -> str:
    found = results["environment"]
    libraries = ", ".join(f"{name} {version}" for name, version in found["libraries"].items())
    return f"{found['cpu']}, 2 cores; Python {found['python']}, {libraries}."


# ---------------------------------------------------------------------------------------------- GPUs


def one_gpu(results: Results) -> str:
    """The choice of figures, every budget, and what the layout of the host pool costs a swap-in."""
    (layouts,) = part_tables("swap_in_layouts", results["parts"]["swap_in_layouts"]["cases"])
    chosen, kept = report.section(results, "gpu-h200.json"), markdown(report.budget_table(results))
    return f"{chosen}\n\n{kept}\n\n{layouts.title}:\n\n{markdown(layouts)}"


def host_tier_on_gpu(results: Results) -> str:
    """Copies between a GPU and its twins, and a large node that was killed."""
    measured = {"environment": results["environment"], "parts": results["parts"]}
    cases = results["parts"]["twin_copies"]["cases"]
    wrong = sum(bool(case["wrong"]) for case in cases)
    killed_on = report.machine(results["warm_restart"])
    told = f"On {report.machine(measured)}; {len(cases)} cases, pages compared byte by byte, {wrong} wrong."
    return f"{told}\n\n{markdown(report.budget_table(measured))}\n\nOn {killed_on}: {restarted(results)}"


def sparse_on_gpu(results: Results) -> str:
    """What fits, and what steps take."""
    return f"On {report.machine(results)}.\n\n{sparse_section(results)}"


def two_gpus(results: Results) -> str:
    """What one GPU cannot show."""
    tables = [
        *part_tables("transport", results["parts"]["transport"]["cases"]),
        *part_tables("ttft", results["parts"]["ttft"]["cases"]),
    ]
    return "\n\n".join(
        [f"On {report.machine(results)}.", *(f"{table.title}:\n\n{markdown(table)}" for table in tables)]
    )


CPU, LOAD = "cpu-2-cores.json", "load-digest-directory-2-cores.json"
SECTIONS: dict[str, tuple[str, Callable[[Results], str]]] = {
    "transports": (CPU, transports),
    "operations": ("operations-2-cores.json", operations),
    "layouts": ("layouts-2-cores.json", layouts),
    "plans": (CPU, plans),
    "overheads": (CPU, overheads),
    "peers": ("peers-2-cores.json", peers),
    "vllm": ("vllm-2-cores.json", vllm),
    "vllm endings": ("vllm-endings-2-cores.json", vllm),
    "paths": ("paths-2-cores.json", paths),
    "load": (LOAD, loads),
    "digests": (LOAD, digests),
    "directory": ("directory-2-cores.json", directories),
    "fleet": ("fleet-1000-instances.json", fleets),
    "soak": ("soak-100000-2-cores.json", soak),
    "shared soak": ("soak-shared-100000-2-cores.json", soak),
    "replay": ("replay-conversation-300-flash.json", replays),
    "prefixes": ("prefix-2-cores.json", prefixes),
    "kept": ("fit-trace-conversation-flash.json", kept),
    "used pools": ("used-pools-2-cores.json", used),
    "shared rooms": ("shared-rooms-2-cores.json", shared),
    "twin copies": ("twin-copies-2-cores.json", twins),
    "warm restart": ("warm-restart-2-cores.json", restarted),
    "stores": ("store-2-cores.json", stores),
    "reuse": ("replay-conversation-1000-tiny-v4.json", reused),
    "reuse from the host": ("replay-conversation-1000-host-tier-tiny-v4.json", reused),
    "one GPU": ("gpu-h200.json", one_gpu),
    "sparse decode": ("gpu-h200-sparse.json", sparse_on_gpu),
    "two GPUs": ("gpu-h200-x2.json", two_gpus),
    "host tier on a GPU": ("gpu-h200-host-tier.json", host_tier_on_gpu),
}


if __name__ == "__main__":
    sys.exit(main())
