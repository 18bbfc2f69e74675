"""What this process may do: files, tracing, its runtime directory, its keys."""

from __future__ import annotations

from collections.abc import Iterator

from kvbridge.daemon.descriptors import SHARE
from kvbridge.doctor.facts import Host
from kvbridge.doctor.findings import Finding, breaks, fine, not_here, warning
from kvbridge.doctor.needs import Needs

LEAST_FILES = 1024


def open_files(host: Host, needs: Needs) -> Iterator[Finding]:
    """Connections are file descriptors; a daemon raises the soft limit to the hard one and serves what that affords."""
    hard = host.process.open_files.hard
    wanted = max([needs.idle_connections, *(port.connections for port in needs.ports)], default=0) * SHARE
    raise_it = (
        "raise the hard limit: systemd LimitNOFILE=1048576; docker --ulimit nofile=1048576; /etc/security/limits.conf"
    )
    if hard is None or hard >= max(wanted, LEAST_FILES):
        yield fine(
            f"{'any number of' if hard is None else hard} files may be open" + (f", {wanted} are enough" * bool(wanted))
        )
    elif hard < LEAST_FILES:
        yield breaks(
            f"only {hard} files may be open (ulimit -Hn)",
            "daemon, rank workers and transports take some hundreds before the first peer connects",
            raise_it,
        )
    else:
        yield warning(
            f"{hard} files may be open (ulimit -Hn), the configured connections want {wanted}",
            f"each endpoint gets a quarter ({hard // SHARE}); callers beyond that are hung up on",
            f"{raise_it}; or lower http.max_connections and control.max_connections",
        )


def tracing(host: Host, needs: Needs) -> Iterator[Finding]:
    """Between two processes of a host, UCX copies by process_vm_writev, which wants the right to trace the other one."""
    scope, tls = host.process.ptrace_scope, needs.settings.nixl.ucx_tls
    by_cma = "nixl" in needs.transports and (not tls or any(name in tls for name in ("cma", "sm", "all")))
    if not by_cma:
        yield not_here("nothing here traces another process", "no transport that is configured needs it")
    elif not scope or host.process.may_trace_any:
        yield fine("processes of one user may read each other's memory (UCX CMA)")
    else:
        yield warning(
            f"kernel.yama.ptrace_scope is {scope}, so UCX cannot copy between two processes of this host (CMA)",
            "NIXL falls back to sockets there, or fails if it is allowed nothing else; the local transport does not need it",
            "put local before nixl in transports.order, or: sysctl kernel.yama.ptrace_scope=0 (containers: --cap-add SYS_PTRACE)",
        )


def runtime_directory(host: Host, needs: Needs) -> Iterator[Finding]:
    """Whoever can enter it is believed, so it must be this user's alone."""
    found = host.process.runtime
    if found is None:
        yield not_here("no runtime directory", "bootstrap has none" if needs.role else "no configuration was given")
    elif found.problem:
        yield breaks(
            found.problem,
            "engines and rank workers trust whoever serves the sockets in it, so a daemon does not start in one that others can "
            "enter",
            f"chown $(id -u) {found.path} && chmod 700 {found.path}, or set runtime_dir",
        )
    else:
        yield fine(f"{found.path} {'is private' if found.exists else 'will be made'}")


def keys(host: Host, needs: Needs) -> Iterator[Finding]:
    """What `kvbridge keys check` says."""
    for each in host.process.keys:
        if each.good:
            yield fine(each.text)
        else:
            yield breaks(
                each.text, "peers or callers will be refused, or a secret is not one", _key_cure(each.text, needs)
            )


def _key_cure(text: str, needs: Needs) -> str:
    if command := text.partition("run: ")[2]:
        return command
    if "kvbridge keys token" in text:
        return "kvbridge keys token NEW_FILE; name it in the configurations of all who show or take that token"
    return f"kvbridge keys check --role {needs.role} --config FILE (and on the other side); kvbridge keys generate NEW_FILE"
