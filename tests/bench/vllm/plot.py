"""A picture of the loads beside NixlConnector's, from a result: `python -m tests.bench.vllm.plot RESULT.json PICTURE.svg`.

Owns: the picture. Must not know: how anything was measured.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

WAYS = {"kvbridge": ("kvbridge", "#00695c"), "nixl": ("NixlConnector, eased", "#b0bec5")}


def main() -> int:
    """Draw."""
    source, target = map(Path, sys.argv[1:3])
    draw(json.loads(source.read_text())["vllm"], target)
    return 0


def draw(found: dict[str, Any], target: Path) -> None:
    """Bars of medians with every single load as a point."""
    import matplotlib as mpl  # optional

    mpl.use("svg")
    import matplotlib.pyplot as plt

    mpl.rcParams.update({"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9})
    cases = found["transfers"]
    figure, axes = plt.subplots(figsize=(8.0, 3.4), layout="constrained")
    width = 0.38
    for side, (name, (title, colour)) in enumerate(WAYS.items()):
        places = [at + (side - 0.5) * width for at in range(len(cases))]
        axes.bar(places, [median(case["load_ms"][name]) for case in cases], width, color=colour, label=title)
        for place, case in zip(places, cases, strict=True):
            axes.plot([place] * len(case["load_ms"][name]), case["load_ms"][name], ".", color="#263238", markersize=2.5)
    axes.set_xticks(
        range(len(cases)),
        [f"{8.4 * -(-case['tokens'] // 128):.0f} MB x {case['at_once']}\n{case['order']}" for case in cases],
    )
    axes.set_ylabel("ms from allocation to loaded")
    axes.set_title("Loads of a vLLM decode server, two cores, UCX over TCP on loopback", fontsize=9, loc="left")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target)


if __name__ == "__main__":
    sys.exit(main())
