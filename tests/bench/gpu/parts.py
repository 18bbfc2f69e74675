"""The parts of the GPU benchmark: names, modules, deadlines.

Owns: the list. Each module has `run(recorder, quick)`; it is imported in a process of its own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One part."""

    name: str
    module: str
    deadline_s: float
    about: str


PARTS = {
    part.name: part
    for part in (
        Part("ceilings", "part_ceilings", 60, "what the host link, the devices and a launch can do at best"),
        Part("copy_pages", "part_copy_pages", 60, "whole C4 pages by kernel, both ways, against pinned copies"),
        Part(
            "twin_copies", "part_twin_copies", 120, "pages and their twins on the host: rates, layers, compute beside"
        ),
        Part("digest", "part_digest", 40, "CRC-32C in device memory against reading it"),
        Part("transport", "part_transport", 100, "local transport: into a shared host pool, and device to device"),
        Part(
            "copy_phases",
            "part_copy_phases",
            60,
            "the local transport part by part: submitted, the device begins, it ends, that is noticed",
        ),
        Part("ttft", "part_ttft", 150, "offer to first swap-in through real daemons, direct and staged"),
        Part(
            "sparse_buys",
            "part_sparse_buys",
            180,
            "decode steps with the hot buffer and with everything on the device: what fits, tokens a second",
        ),
        Part("swap_in_layouts", "part_swap_in_layouts", 60, "swap-in from host pages of one layer, and of all layers"),
        Part("swap_in", "part_swap_in", 300, "swap-in against the bare gather and SGLang's kernel"),
    )
}
TOTAL_S = 580.0
"""All parts together; one that comes late gets what is left."""
