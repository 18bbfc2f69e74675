"""The figures on the page about performance are those of the committed results."""

from __future__ import annotations

import pytest

from tests.bench import page


def test_the_page_says_what_the_files_say() -> None:
    """Write it again with `python -m tests.bench.page`."""
    text = page.PAGE.read_text()
    assert page.written(text) == text


def test_every_committed_result_is_on_the_page() -> None:
    files = {path.name for path in page.RESULTS.iterdir()}
    places = {file for file, _ in page.SECTIONS.values()}
    assert files <= places
    text = page.PAGE.read_text()
    assert all(f"| `{file}` |" in text for file in places)
    assert {file for file in places if f"Not measured yet (`{file}`)." in text} == places - files


def test_a_section_goes_between_its_marks() -> None:
    document = "before\n<!-- figures of one begin -->\nold\n<!-- figures of one end -->\nafter\n"
    assert page.placed(document, "one", r"new \1") == document.replace("old", r"new \1")
    with pytest.raises(ValueError, match="no section"):
        page.placed("nothing here", "one", "new")
