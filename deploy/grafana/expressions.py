"""PromQL as the boards need it again and again, always of the daemons that are chosen at the top.

Owns: the forms of expressions. Must not know: panels. A metric is named without its prefix: `rooms` is `kvbridge_rooms`.
"""

from __future__ import annotations

CHOSEN = 'instance=~"$instance"'
NAME = "on (job, instance) group_left (daemon) kvbridge_build_info"
"""Joined to what a daemon exports, it adds the daemon's own name, as `prefill-0/node-0`."""


def now(metric: str, by: str = "", *, where: str = "", how: str = "sum") -> str:
    """A gauge, added up (or what `how` says) over all labels but `by`."""
    return f"{how}{_by(by)}({_chosen(metric, where)})"


def rate(metric: str, by: str = "", *, where: str = "") -> str:
    """What a counter gains in a second."""
    return f"sum{_by(by)}(rate({_chosen(metric, where)}[$__rate_interval]))"


def gained(metric: str, by: str = "", *, where: str = "") -> str:
    """What a counter has gained in the time that is shown."""
    return f"sum{_by(by)}(increase({_chosen(metric, where)}[$__range]))"


def mean(metric: str, by: str = "", *, where: str = "") -> str:
    """The mean of a histogram's observations."""
    return f"{rate(f'{metric}_sum', by, where=where)} / {rate(f'{metric}_count', by, where=where)}"


def quantile(share: float, metric: str, by: str = "", *, where: str = "", window: str = "$__rate_interval") -> str:
    """A quantile of a histogram, all chosen daemons together."""
    grouping = f"le, {by}" if by else "le"
    return f"histogram_quantile({share:g}, sum by ({grouping}) (rate({_chosen(f'{metric}_bucket', where)}[{window}])))"


def of_each(metric: str, by: str = "", *, where: str = "", how: str = "sum") -> str:
    """A gauge of each daemon, under the daemon's own name."""
    labels = ", ".join(filter(None, ("job, instance", by)))
    return f"{how} by ({labels}) ({_chosen(metric, where)}) * {NAME}"


def rate_of_each(metric: str, by: str = "", *, where: str = "") -> str:
    """What a counter of each daemon gains in a second, under the daemon's own name."""
    labels = ", ".join(filter(None, ("job, instance", by)))
    return f"sum by ({labels}) (rate({_chosen(metric, where)}[$__rate_interval])) * {NAME}"


def _chosen(metric: str, where: str) -> str:
    name = metric if metric.startswith(("process_", "gen_ai_")) else f"kvbridge_{metric}"
    return f"{name}{{{', '.join(filter(None, (CHOSEN, where)))}}}"


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else " "
