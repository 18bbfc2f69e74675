"""The pages that a request needs in each index space, and its page tables.

Window pages form a ring. A request reserves `n = pages_needed(...)[SWA]` physical pages at admission and never more. Logical page
`j` lies in entry `(j - first) % n`, where `first` is the first logical page that was live at the end of the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from kvbridge.core.errors import ConflictError, InvalidInputError
from kvbridge.core.geometry.components import Component, ComponentKind, Liveness, ModelGeometry, RowInterval
from kvbridge.core.ids import MOST_PAGES, IndexSpace, PageIdArray, PageTable, Tables
from kvbridge.core.wire.messages import WireTable

NO_HOST: frozenset[ComponentKind] = frozenset()
GROWING_SPACES = (IndexSpace.FULL, IndexSpace.HOST)
"""A page of these is final once its tokens are computed."""


def pages_needed(
    geometry: ModelGeometry,
    *,
    tokens: int,
    prompt_tokens: int | None = None,
    host: frozenset[ComponentKind] = NO_HOST,
) -> dict[IndexSpace, int]:
    """Return the pages to reserve in each space that the node uses, for a request that ends with `tokens` tokens.

    Decode begins at `prompt_tokens`; None: nothing is appended, as on a prefill node. `host`: components in the node's host pool.
    Raises InvalidInputError for token counts that contradict each other, and for a component that cannot live in the host pool.
    """
    begin = tokens if prompt_tokens is None else prompt_tokens
    if not 0 <= begin <= tokens:
        raise InvalidInputError(f"need 0 <= prompt_tokens <= tokens, got prompt_tokens {begin} and tokens {tokens}")
    for kind in sorted(host):
        if not geometry.component(kind).host_capable:
            raise InvalidInputError(f"component '{kind}' of model '{geometry.name}' cannot live in the host pool")
    needed: dict[IndexSpace, int] = {}
    for component in geometry.components:
        space, stop = component.space, -(-tokens // geometry.tokens_per_page)
        if component.kind in host:
            # Complete rows only, so this is one less than FULL where the last page holds no complete row yet.
            pages = -(-(tokens // component.tokens_per_row) // component.slots_per_page)
            needed[IndexSpace.HOST] = max(needed.get(IndexSpace.HOST, 0), pages)
        elif space in needed:
            continue  # equal for all components of the space
        elif space is IndexSpace.FULL:
            needed[space] = stop
        elif space is IndexSpace.SWA:
            needed[space] = min(most_window_pages(geometry), stop - first_window_page(geometry, begin))
        else:
            needed[space] = 1  # reserved always: decode fills its rings even when nothing of them is sent
    return needed


def check_demand(demand: Mapping[IndexSpace, int]) -> None:
    """Raise InvalidInputError when a request needs more pages of a space than a message can name."""
    for space, count in demand.items():
        if count > MOST_PAGES:
            raise InvalidInputError(
                f"the request needs {count} pages of space '{space}', one page table names at most {MOST_PAGES}; "
                "shorten the request"
            )


# ------------------------------------------------------------------------------------------- windows


def first_window_page(geometry: ModelGeometry, tokens: int) -> int:
    """Return the logical page of the first row that is live in the window space at `tokens` tokens, or else of the next row."""
    return min((rows.start for rows in _live_windows(geometry, tokens)), default=tokens) // geometry.tokens_per_page


def window_pages(geometry: ModelGeometry, tokens: int) -> range:
    """Return the logical pages of the window space with live rows at `tokens` tokens; often one or two."""
    first = first_window_page(geometry, tokens)
    stop_row = max((rows.stop for rows in _live_windows(geometry, tokens)), default=0)
    return range(first, max(first, -(-stop_row // geometry.tokens_per_page)))


def most_window_pages(geometry: ModelGeometry) -> int:
    """Return the most window pages that a request can need at once, to compute one more token."""
    page, most = geometry.tokens_per_page, 0
    for component in _window_components(geometry):
        match component.liveness:
            case Liveness.WINDOW:
                rows, step = component.window, 1
            case Liveness.TAIL:
                # A block is pooled when its last token arrives, so then it and its overlap are needed whole.
                rows, step = component.block * (component.overlap + 1), math.gcd(component.block, page)
            case _:
                rows, step = 1, page
        most = max(most, (page - step + rows - 1) // page + 1)
    return most


def _live_windows(geometry: ModelGeometry, tokens: int) -> list[RowInterval]:
    rows = [component.live_rows(tokens) for component in _window_components(geometry)]
    return [interval for interval in rows if interval.count]


def _window_components(geometry: ModelGeometry) -> list[Component]:
    return [component for component in geometry.components if component.space is IndexSpace.SWA]


def rotate_window(table: PageTable, *, first_page: int, page_count: int) -> PageTable:
    """Return the table of the logical pages [first_page, first_page + page_count) from `table`, the ring as it was reserved.

    Raises InvalidInputError for pages before the ring, and for more pages than the ring holds at once.
    """
    ids = table.require(IndexSpace.SWA)
    if first_page < table.first_page:
        raise InvalidInputError(f"window page {first_page} lies before the ring, which begins at {table.first_page}")
    if not 0 <= page_count <= len(ids):
        raise InvalidInputError(f"a ring of {len(ids)} window pages cannot hold {page_count} pages at once")
    entries = (first_page - table.first_page + np.arange(page_count)) % max(1, len(ids))
    return PageTable(IndexSpace.SWA, ids[entries], first_page)


# ------------------------------------------------------------------------------------------- tables


def request_tables(geometry: ModelGeometry, ids: Mapping[IndexSpace, PageIdArray], *, prompt_tokens: int) -> Tables:
    """Build the tables of a request of `prompt_tokens` tokens; a window table begins with its last window."""
    first_window = first_window_page(geometry, prompt_tokens) if IndexSpace.SWA in ids else 0
    return {
        space: PageTable(
            space, np.ascontiguousarray(pages, dtype=np.int32), first_window if space is IndexSpace.SWA else 0
        )
        for space, pages in ids.items()
    }


def further_tables(held: Tables, named: Tables) -> Tables:
    """Return the pages of `named` behind those of `held`; `named` may repeat these. Raises ConflictError for others, or a gap."""
    further = {}
    for space, table in named.items():
        before = held.get(space)
        if before is None:
            further[space] = table
            continue
        stop = before.first_page + len(before)
        repeated = table.ids[: max(0, stop - table.first_page)]
        known = before.ids[max(0, table.first_page - before.first_page) :][: len(repeated)]
        if not before.first_page <= table.first_page <= stop or not np.array_equal(repeated, known):
            raise ConflictError(
                f"the room has {len(before)} logical pages of space '{space}' from {before.first_page} on; the {len(table)} pages "
                f"named from {table.first_page} on differ from them or leave a gap"
            )
        if len(repeated) < len(table):
            further[space] = PageTable(space, table.ids[len(repeated) :], stop)
    return further


def joined_tables(held: Tables, more: Tables) -> Tables:
    """Return `held` with the pages of `more` behind, space by space; neither is changed."""
    together = dict(held)
    for space, table in more.items():
        before = held.get(space)
        together[space] = (
            table if before is None else PageTable(space, np.concatenate([before.ids, table.ids]), before.first_page)
        )
    return together


def tables_from_wire(wire: tuple[WireTable, ...]) -> Tables:
    """Decode the tables of a message. Raises InvalidInputError when they are malformed."""
    try:
        tables = {
            table.space: PageTable(table.space, np.frombuffer(table.ids, "<i4").astype(np.int32), table.first_page)
            for table in wire
        }
    except ValueError as error:
        raise InvalidInputError(f"the page tables are malformed: {error}") from error
    if len(tables) != len(wire):
        raise InvalidInputError(f"the page tables name a space twice: {[table.space.value for table in wire]}")
    for space, table in tables.items():
        if len(table) and int(table.ids.min()) < 0:
            raise InvalidInputError(f"page id {int(table.ids.min())} of space '{space}' is negative")
    return tables


def tables_cover(
    tables: Tables,
    geometry: ModelGeometry,
    *,
    tokens: int,
    host: frozenset[ComponentKind] = NO_HOST,
    prefix_tokens: int = 0,
) -> None:
    """Raise InvalidInputError unless `tables` give a page to every live row of a request that now has `tokens` tokens.

    More pages may be given, and pages of `full` that hold only the first `prefix_tokens` may be left out. Only the page book and
    the plan know whether the pages exist.
    """
    firsts = {
        IndexSpace.SWA: first_window_page(geometry, tokens),
        IndexSpace.FULL: prefix_tokens // geometry.tokens_per_page,
    }
    needed = pages_needed(geometry, tokens=tokens, host=host)
    states = [one.live_rows(tokens).count for one in geometry.components if one.space is IndexSpace.REQUEST]
    if not any(states):  # there may be no state at some lengths, and then nothing of the slot is sent
        needed.pop(IndexSpace.REQUEST, None)
    for space, count in needed.items():
        first = firsts.get(space, 0)
        stop = first + count if space is IndexSpace.SWA else count
        _check_table(tables.get(space), space, pages=range(first, stop), tokens=tokens)


def tables_hold(tables: Tables, geometry: ModelGeometry, *, tokens: int) -> None:
    """Raise InvalidInputError unless `tables` give a page of `full` to each of a prompt's first `tokens` tokens."""
    if tokens and any(component.space is IndexSpace.FULL for component in geometry.components):
        needed = range(-(-tokens // geometry.tokens_per_page))
        _check_table(tables.get(IndexSpace.FULL), IndexSpace.FULL, pages=needed, tokens=tokens)


def _check_table(table: PageTable | None, space: IndexSpace, *, pages: range, tokens: int) -> None:
    need = f"a request of {tokens} tokens needs {len(pages)} pages of space '{space}'"
    if pages.start:
        need = f"{need}, from logical page {pages.start}"
    if table is None:
        raise InvalidInputError(f"{need}, got no table for it")
    if space is not IndexSpace.SWA and table.first_page > pages.start:
        raise InvalidInputError(
            f"{need}, got a table that begins at logical page {table.first_page} instead of {pages.start}"
        )
    held = range(table.first_page, table.first_page + len(table.require(space)))
    if pages and not (held.start <= pages.start and pages.stop <= held.stop):
        raise InvalidInputError(f"{need}, got {len(held)} from logical page {held.start}")
