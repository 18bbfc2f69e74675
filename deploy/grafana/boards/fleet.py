"""The directory, the daemons that it knows, and the HTTP APIs of all."""

from __future__ import annotations

from deploy.grafana.expressions import CHOSEN, NAME, now, quantile, rate, rate_of_each
from deploy.grafana.panels import Board, Query, Row, heat, lines, number, table

REFUSED = 'outcome!="paired"'
A_ROUTER = "`kvbridge router` runs"

BOARD = Board(
    "kvbridge-fleet",
    "kvbridge / Bootstrap and fleet",
    "Which instances can be paired, whether daemons and directory hear each other, what the HTTP APIs answer, and what runs.",
    (
        Row(
            "Directory",
            (
                number(
                    "Prefill instances ready",
                    "As the directory sees them. At 0 no request can be paired.",
                    now("instances", where='role="prefill", state="ready"', how="min"),
                ),
                number(
                    "Decode instances ready",
                    "As the directory sees them. At 0 no request can be paired.",
                    now("instances", where='role="decode", state="ready"', how="min"),
                ),
                number(
                    "Pairings a second",
                    "Requests that got a pair.",
                    rate("pairings_total", where='outcome="paired"'),
                    unit="ops",
                ),
                number(
                    "Pairings that fail",
                    "Share of requests for a pair that were refused, in the time of one step.",
                    f"{rate('pairings_total', where=REFUSED)} / ({rate('pairings_total')} > 0) or vector(0)",
                    unit="percentunit",
                    bad_above=0.05,
                ),
                number(
                    "Failures of the store",
                    "Calls to the directory's store that failed in the last 15 minutes; always 0 for the store in memory.",
                    f"sum(increase(kvbridge_store_failures_total{{{CHOSEN}}}[15m]))",
                    bad_above=1,
                ),
                lines(
                    "Instances by state",
                    "Ready: can be paired. Not ready: complete, but a node admits nothing. Incomplete: ranks are missing.",
                    Query(now("instances", "role, state", how="max"), "{{role}} {{state}}"),
                ),
                lines(
                    "Where daemons stand with the directory",
                    "Number of prefill and decode daemons by registration state. All should be `registered`.",
                    Query(now("directory_registration", "state"), "{{state}}"),
                    stacked=True,
                ),
                lines(
                    "Pairings by outcome",
                    "`paired`, or the code of the error that the caller got.",
                    Query(rate("pairings_total", "outcome"), "{{outcome}}"),
                    unit="ops",
                ),
                heat(
                    "Time of a pairing",
                    "Both reservations included.",
                    rate("pairing_duration_seconds_bucket", "le"),
                    unit="s",
                    width=8,
                ),
                lines(
                    "Pairings by where the prompt is known",
                    "Requests with page keys, by side. Many `stale`: nodes lose what they were given, or rooms fail. "
                    "Many `passed_over`: those that hold the prompts are too full.",
                    Query(rate("pairing_prefixes_total", "role, outcome"), "{{role}} {{outcome}}"),
                    unit="ops",
                ),
                lines(
                    "Trouble with the store",
                    "Calls that failed and values that were malformed, a second.",
                    Query(rate("store_failures_total", "reason"), "call: {{reason}}"),
                    Query(rate("store_values_refused_total", "reason"), "value: {{reason}}"),
                    unit="ops",
                ),
            ),
        ),
        Row(
            "Router",
            (
                lines(
                    "Requests to the router",
                    "By how they were sent and what became of them; `decode_alone` took no prefill server.",
                    Query(rate("router_requests_total", "order, outcome"), "{{order}} {{outcome}}"),
                    unit="reqps",
                    empty_unless=A_ROUTER,
                ),
                lines(
                    "Time to the first byte, p99",
                    "From a request to the router to the first byte of its answer, all that was tried included.",
                    Query(quantile(0.99, "router_first_byte_seconds", "order"), "{{order}}"),
                    unit="s",
                    empty_unless=A_ROUTER,
                ),
                lines(
                    "Time of an answer, p99",
                    "From a request to the router to the end of its answer, and to the first byte where the answer is streamed.",
                    Query(
                        quantile(0.99, "gen_ai_server_request_duration_seconds", "gen_ai_operation_name"),
                        "{{gen_ai_operation_name}} whole",
                    ),
                    Query(
                        quantile(0.99, "gen_ai_server_time_to_first_token_seconds", "gen_ai_operation_name"),
                        "{{gen_ai_operation_name}} first token",
                    ),
                    unit="s",
                    empty_unless=A_ROUTER,
                ),
                lines(
                    "Attempts that failed",
                    "At a server, before the first byte; the request was tried elsewhere.",
                    Query(rate("router_attempts_failed_total", "role, reason"), "{{role}} {{reason}}"),
                    unit="ops",
                    empty_unless=A_ROUTER,
                ),
                lines(
                    "Servers",
                    "Those that are well, and those that get no request, as each router sees them.",
                    Query(now("router_servers", "role, state", how="max"), "{{role}} {{state}}"),
                    empty_unless=A_ROUTER,
                ),
            ),
        ),
        Row(
            "HTTP",
            (
                lines(
                    "Requests by route",
                    "Requests a second.",
                    Query(rate("http_requests_total", "route, method"), "{{method}} {{route}}"),
                    unit="reqps",
                ),
                lines(
                    "Errors",
                    "Answers from 400 on, by route and status. 503 is how a daemon says 'not now'; 500 is a defect.",
                    Query(rate("http_requests_total", "route, code", where='code=~"[45].."'), "{{code}} {{route}}"),
                    unit="reqps",
                    empty_unless="an error was answered since the daemons started",
                ),
                lines(
                    "Time of an answer, p99",
                    "Until the last byte. Requests that ask to wait do wait.",
                    Query(quantile(0.99, "http_request_duration_seconds", "route, method"), "{{method}} {{route}}"),
                    unit="s",
                ),
            ),
        ),
        Row(
            "Processes",
            (
                lines(
                    "Rank workers",
                    "By state. `absent` and `starting` ones keep their node from being ready.",
                    Query(now("workers", "state"), "{{state}}"),
                ),
                lines(
                    "Open files",
                    "As a share of the limit of the process.",
                    Query(
                        f"process_open_fds{{{CHOSEN}}} / process_max_fds{{{CHOSEN}}} * {NAME}",
                        "{{daemon}}",
                    ),
                    unit="percentunit",
                ),
                lines(
                    "CPU",
                    "Of the node process, as a share of one core.",
                    Query(rate_of_each("process_cpu_seconds_total"), "{{daemon}}"),
                    unit="percentunit",
                ),
                lines(
                    "Time of a scrape",
                    "How long Prometheus takes to read a daemon's metrics.",
                    Query(f"max by (job, instance) (scrape_duration_seconds{{{CHOSEN}}})", "{{instance}}"),
                    unit="s",
                ),
                lines(
                    "Log lines left out",
                    "Lines a second that were not written because there were too many of their kind.",
                    Query(rate("log_lines_left_out_total", "event"), "{{event}}"),
                    unit="ops",
                ),
                lines(
                    "Spans of traces",
                    "Spans a second that the collector has taken, and those that were lost.",
                    Query(rate("trace_spans_total", "outcome"), "{{outcome}}"),
                    unit="ops",
                ),
                table(
                    "What runs",
                    "Versions, models and libraries. Instances of one model must have one fingerprint.",
                    {"Running": Query(f"kvbridge_build_info{{{CHOSEN}}}")},
                    by=(
                        "daemon",
                        "role",
                        "instance",
                        "version",
                        "model",
                        "fingerprint",
                        "python",
                        "torch",
                        "mooncake",
                        "nixl",
                    ),
                    units={},
                ),
            ),
        ),
    ),
)
