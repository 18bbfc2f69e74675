"""Small edits of code: each is found once, named without its line, and made where its name says."""

from pathlib import Path

import pytest

from tests.mutation import edits
from tests.mutation.edits import Edit, edited, edits_of

CODE = """
LIMIT = 3 if True else 4

class Counter:
    count = 0

    def add(self, number, seen):
        if number < LIMIT and number not in seen:
            seen.append(number)
            self.count += number
        return self.count
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(edits, "ROOT", tmp_path)
    found = tmp_path / "kvbridge" / "counter.py"
    found.parent.mkdir()
    found.write_text(CODE)
    return found


def added(edit: Edit, number: int) -> tuple[int, list[int]]:
    """Return the edited code's result for a number."""
    names: dict[str, object] = {}
    exec(edited(edit), names)
    counter, seen = names["Counter"](), []  # type: ignore[operator]
    return counter.add(number, seen), seen


def test_each_edit_changes_what_it_says(path: Path) -> None:
    found = {(edit.kind, edit.text): edit for edit in edits_of(path)}
    assert {edit.function for edit in found.values()} == {"Counter.add"}
    condition = "number < LIMIT and number not in seen"
    assert {key: added(edit, 2) for key, edit in found.items()} == {
        ("negate", condition): (0, []),
        ("and/or", condition): (2, [2]),
        ("compare", "number < LIMIT"): (2, [2]),
        ("compare", "number not in seen"): (0, []),
        ("drop call", "seen.append(number)"): (2, []),
        ("drop assignment", "self.count += number"): (0, [2]),
    }
    assert added(found["compare", "number < LIMIT"], 3) == (3, [3])
    assert added(found["and/or", condition], 7) == (7, [7])


def test_a_name_holds_when_lines_move_and_fails_when_the_code_is_gone(path: Path) -> None:
    [edit] = [edit for edit in edits_of(path) if edit.kind == "drop call"]
    path.write_text("# a line\n" + CODE)
    assert added(edit, 2) == (2, [])
    path.write_text("LIMIT = 3\n")
    with pytest.raises(LookupError, match="drop call"):
        edited(edit)


@pytest.mark.slow
def test_names_of_the_package_are_distinct() -> None:
    names = [edit.name for edit in edits.all_edits()]
    assert len(names) == len(set(names)) > 1_000
