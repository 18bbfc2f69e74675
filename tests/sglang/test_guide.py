"""The router of docs/sglang.md in front of the suite's servers: a question of the page, streamed and not, and several at once."""

import json
from typing import Any

import httpx

from tests.engines.guide import commands, router, value
from tests.engines.prompts import prompt
from tests.engines.servers import ANSWER_S, together
from tests.sglang.fleet import Fleet

PAGE = "sglang.md"
PATH = "/v1/completions"


def body(text: object, **more: Any) -> dict[str, Any]:
    """Return the page's question with another prompt."""
    (question,) = commands(PAGE, "curl")
    return json.loads(value(question, "-d")) | {"prompt": text, "temperature": 0, "ignore_eos": True, **more}


def ask(url: str, asked: dict[str, Any]) -> list[str]:
    """Return the texts of an answer."""
    answer = httpx.post(f"{url}{PATH}", json=asked, timeout=ANSWER_S, trust_env=False)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def stream(url: str, asked: dict[str, Any]) -> list[str]:
    """Return the text of a streamed answer, as `ask` does."""
    with httpx.stream(
        "POST", f"{url}{PATH}", json=asked | {"stream": True}, timeout=ANSWER_S, trust_env=False
    ) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return ["".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])]


def test_the_router_serves_pairs(fleet: Fleet) -> None:
    single, prefill, decode = (fleet.servers[name] for name in ("single", "prefill", "mooncake"))
    starts = commands(PAGE, "python -m sglang.launch_server")
    modes = {value(words, "--disaggregation-mode"): value(words, "--port") for words in starts}
    ports = {modes["prefill"]: prefill.port, modes["decode"]: decode.port}
    (words,) = commands(PAGE, "kvbridge router")
    questions = [body(prompt(300, f"router {number}")) for number in range(4)]
    several = body([prompt(100, f"several {number}") for number in range(3)])
    expected = {id(one): ask(single.url, one) for one in (*questions, several)}
    before = decode.rooms_completed()
    with router(words, ports) as url:
        got = together([lambda one=one, how=how: how(url, one) for one in questions for how in (ask, stream)])
        assert got == [expected[id(one)] for one in questions for _ in range(2)]
        assert ask(url, several) == expected[id(several)]
        refused = httpx.post(f"{url}{PATH}", json=questions[0] | {"n": 2}, timeout=ANSWER_S, trust_env=False)
        assert refused.status_code == 400, refused.text
    assert decode.rooms_completed() - before == 2 * len(questions) + 3
