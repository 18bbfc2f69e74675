"""Judgements of answers to false requests, and the tables of docs/false-hand-offs.md that they make."""

from collections.abc import Iterable, Mapping, Sequence

from tests.engines.fleet import Fleet
from tests.engines.prompts import Answer

RIGHT, OTHER, WRONG = "the right tokens", "**the answer to another prompt**", "**wrong tokens**"


def judge(fleet: Fleet, asked: Sequence[int], answer: Answer, other: Sequence[int] = ()) -> str:
    """Return what a client got. `other`: the prompt whose answer it must not be."""
    if answer.is_error:
        return f"error (HTTP {answer.status})" if answer.status != 200 else f"error (answer ends: `{answer.reason}`)"
    if not fleet.wrong(asked, answer):
        return RIGHT
    return OTHER if other and not fleet.wrong(other, answer) else WRONG


def is_harmless(judged: str) -> bool:
    return judged == RIGHT or (judged.startswith("error") and "**" not in judged)


def table(headings: Sequence[str], cases: Iterable[Sequence[str]], columns: Mapping[str, Sequence[str]]) -> str:
    """Return cases with their outcomes, a column for each of those that were tried."""
    names = (*headings, *columns)
    rows = ((*case, *outcomes) for case, *outcomes in zip(cases, *columns.values(), strict=True))
    lines = [names, ("---",) * len(names), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
