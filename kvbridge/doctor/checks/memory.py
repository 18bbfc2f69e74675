"""Memory: what may be locked, where pools go, what limits them, on which node they lie."""

from __future__ import annotations

from collections.abc import Iterator

from kvbridge.doctor.facts import Host, NumaNode
from kvbridge.doctor.findings import Finding, breaks, fine, mebibytes, not_here, size, warning
from kvbridge.doctor.needs import Needs

LEAST_LOCKED_BYTES = 64 << 20
"""What RDMA queues and small buffers want locked, when the size of the pools is not known."""
RESERVED_PART = 10
"""Reserved huge pages are worth a word from this part (1/n) of the memory on."""
HUGE_PAGES_PAY_BYTES = 1 << 30


def locked(host: Host, needs: Needs) -> Iterator[Finding]:
    """RDMA registration locks every page, and counts it against RLIMIT_MEMLOCK."""
    limit, wanted = host.memory.locked.soft, max(needs.locked_bytes, LEAST_LOCKED_BYTES)
    shown = "unlimited" if limit is None else size(limit)
    if limit is None or host.memory.may_lock_any:
        privilege = " (CAP_IPC_LOCK)" if host.memory.may_lock_any else ""
        yield fine(f"memory may be locked without a limit{privilege}")
    elif limit >= wanted:
        yield fine(f"{shown} may be locked, {size(wanted)} are needed")
    elif not needs.rdma_required and not (needs.rdma_wanted and host.network.rdma):
        yield not_here(
            f"only {shown} may be locked (ulimit -l)",
            "nothing here locks memory: only RDMA would, to register the pools",
        )
    else:
        yield breaks(
            f"only {shown} may be locked (ulimit -l), {size(wanted)} are needed",
            "the network card registers the pools, which locks their pages: beyond the limit registration fails with ENOMEM",
            "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1; "
            "kubernetes: securityContext.capabilities.add: [IPC_LOCK])",
        )


def shared(host: Host, needs: Needs) -> Iterator[Finding]:
    """Pools are files in shared memory: it must be memory, and large enough."""
    for directory in host.memory.shared:
        path = directory.path
        if directory.problem:
            yield breaks(
                f"shared memory: {directory.problem}",
                "pools are files that daemon, rank workers and engines map; on a disk every access would go through it",
                f"mkdir -p {path} && mount -t tmpfs -o size={mebibytes(max(needs.shared_bytes, 1 << 30))} kvbridge {path}, or "
                "set pools.host.directory: /dev/shm",
                subject=path,
            )
            continue
        need = 0 if host.reach.running else needs.shared_bytes
        if path != needs.directory or need <= directory.free_bytes:
            yield fine(
                f"{path} has {size(directory.free_bytes)} free of {size(directory.total_bytes)}"
                + (f", the pools take {size(need)}" if path == needs.directory and need else ""),
                subject=path,
            )
            continue
        lacking = need - directory.free_bytes
        target = mebibytes(directory.total_bytes + lacking)
        yield breaks(
            f"{path} has {size(directory.free_bytes)} free of {size(directory.total_bytes)}, the pools need {size(need)}",
            f"{size(lacking)} are lacking, so the daemon will not start (Docker gives containers 64 MiB unless told otherwise)",
            f"mount -o remount,size={target} {path} (docker: --shm-size={target}; kubernetes: "
            "an emptyDir with medium: Memory), `kvbridge clean` for what dead daemons left, or smaller pools",
            subject=path,
        )


def limits(host: Host, needs: Needs) -> Iterator[Finding]:
    """Shared memory is charged to the control group of whoever touches it first; beyond the limit the kernel kills."""
    need = 0 if host.reach.running else needs.shared_bytes
    for limit in host.memory.limits:
        if need <= limit.available_bytes:
            yield fine(f"{limit.name}: {size(limit.available_bytes)} left", subject=limit.name)
        else:
            yield breaks(
                f"{limit.name}: {size(limit.available_bytes)} left, the pools need {size(need)}",
                "pools are touched whole at the start; beyond the limit the kernel kills the daemon (OOM, exit 137), "
                "so it refuses to start",
                limit.cure + ", or configure smaller pools",
                subject=limit.name,
            )


def huge_pages(host: Host, needs: Needs) -> Iterator[Finding]:
    """Reserved huge pages are memory that nothing else gets; transparent ones speed up large pools."""
    pages, whole = host.memory.huge_pages, sum(node.total_bytes for node in host.memory.nodes)
    idle_bytes = pages.free * pages.page_bytes
    if whole and idle_bytes > whole // RESERVED_PART:
        yield warning(
            f"{size(idle_bytes)} are reserved as huge pages and unused",
            "neither tmpfs nor anything else can use them, so memory runs out earlier than free memory suggests; only a pool "
            "directory on hugetlbfs takes them",
            "sysctl vm.nr_hugepages=0, or set pools.host.directory to a hugetlbfs mount",
        )
    elif needs.shared_bytes > HUGE_PAGES_PAY_BYTES and pages.shared_memory in {"never", "deny"}:
        yield warning(
            f"shared memory gets no huge pages (shmem_enabled is {pages.shared_memory}), the pools have {size(needs.shared_bytes)}",
            "with pages of 4 KiB, touching a large pool for the first time and registering it takes longer",
            "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        )
    elif pages.total:
        yield fine(f"{pages.total} huge pages of {size(pages.page_bytes)} are reserved, {pages.free} of them unused")
    else:
        yield not_here(
            f"no huge pages are reserved; shared memory: {pages.shared_memory or 'not told'}", "none are needed"
        )


def numa(host: Host, needs: Needs) -> Iterator[Finding]:
    """A pool on the other socket is slower for whatever reads it."""
    nodes, allowed = host.memory.nodes, set(host.memory.allowed_nodes)
    if len(nodes) < 2:
        yield not_here("one NUMA node", "all memory is equally near")
        return
    gpu_nodes = {gpu.node for gpu in host.devices.gpus if gpu.ordinal in needs.gpus and gpu.node is not None}
    if gpu_nodes and allowed and not gpu_nodes <= allowed:
        near = ",".join(map(str, sorted(gpu_nodes)))
        yield warning(
            f"this process may only use memory of nodes {sorted(allowed)}, its GPUs are on {sorted(gpu_nodes)}",
            "the host pool would lie on the other socket: every swap-in and every copy crosses the link between them",
            f"numactl --cpunodebind={near} --membind={near} kvbridge {needs.role} ...",
        )
    usable = [node for node in nodes if not allowed or node.number in allowed]
    yield _spread(usable, needs, 0 if host.reach.running else needs.shared_bytes)


def _spread(usable: list[NumaNode], needs: Needs, need: int) -> Finding:
    free = sum(node.free_bytes for node in usable)
    largest = max(usable, key=lambda node: node.free_bytes, default=None)
    if largest is not None and need > largest.free_bytes and need <= free:
        return warning(
            f"the pools ({size(need)}) fit on no single node (at most {size(largest.free_bytes)} free on node {largest.number})",
            "they will be spread in the order in which pages are touched, so rates differ from page to page",
            f"numactl --interleave=all kvbridge {needs.role or 'decode'} ..., or one daemon for each socket",
        )
    return fine(f"{len(usable)} NUMA nodes with {size(free)} free")


def left(host: Host, needs: Needs) -> Iterator[Finding]:
    """What killed daemons left takes memory until somebody sweeps it."""
    del needs
    ours = [file for file in host.memory.left if file.ours]
    others = [file for file in host.memory.left if not file.ours]
    if ours:
        total = sum(file.size_bytes for file in ours)
        yield warning(
            f"{len(ours)} files of dead daemons take {size(total)} of shared memory",
            "the next daemon that starts here as this user removes them; until then they take memory from everybody",
            "kvbridge clean",
        )
    for file in others:
        yield warning(
            f"{file.path} ({size(file.size_bytes)}) cannot be swept by this user: {file.why}",
            "if its daemon is dead it takes memory for ever: only its own user may remove it",
            f"sudo -u '#{file.user_id}' kvbridge clean",
            subject=file.path,
        )
    if not host.memory.left:
        yield fine("no leftovers of dead daemons")
