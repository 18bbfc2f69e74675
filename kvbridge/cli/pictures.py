"""How all pictures of the project look: colours, letters, grid.

Owns: the style, and the file that a picture becomes. Must not know: what is drawn. matplotlib is an extra and imported late.

Colours are those of Okabe and Ito, which colour-blind readers tell apart; the dashboards have the same.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvbridge.core.errors import UnsupportedError

GREY, ORANGE, SKY, GREEN = "#999999", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
INK, QUIET, LINE = "#16202b", "#566373", "#dde3ea"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "text.color": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": QUIET,
    "axes.edgecolor": QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.titlesize": 12,
    "figure.titleweight": "bold",
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.h_pad": 0.08,
}
DOTS_PER_INCH = 120
MISSING = "a picture needs matplotlib: pip install 'kvbridge[plot]'"


def require_plots() -> None:
    """Raise UnsupportedError when pictures cannot be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError(MISSING)


@contextmanager
def picture(path: Path, size_inches: tuple[float, float]) -> Iterator[Any]:
    """Give an empty figure to draw on and write it as PNG.

    Raises UnsupportedError without matplotlib, OSError when the file cannot be written.
    """
    require_plots()
    import matplotlib as mpl  # noqa: PLC0415 - an extra
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size_inches, layout="constrained")
        yield figure
        figure.savefig(path, format="png", dpi=DOTS_PER_INCH)
