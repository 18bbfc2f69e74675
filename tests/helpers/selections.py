"""Record which rows the tiny DeepSeek-V4 selects while it decodes: `python -m tests.helpers.selections`."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

FOLDER = Path(__file__).parent.parent / "data"
RECORDED = (2_000, 8_000)
STEPS = 400
CHUNK_TOKENS = 512


class Selections(NamedTuple):
    top_k: npt.NDArray[np.int16]
    """[steps, C4 layers, k]: rows in the order of the indexer's scores; -1 is no row."""
    rows: npt.NDArray[np.int32]
    """[steps]: complete C4 rows of the request at each step, its newest one included."""


def selections_file(prompt_tokens: int) -> Path:
    return FOLDER / f"selections-{prompt_tokens}.npz"


def load_selections(prompt_tokens: int) -> Selections:
    with np.load(selections_file(prompt_tokens), allow_pickle=False) as held:
        return Selections(top_k=held["top_k"], rows=held["rows"])


def record(prompt_tokens: int, *, steps: int = STEPS) -> Selections:
    """Decode greedily with the dense model and note what every indexer picks."""
    from kvbridge.engine.adapters.transformers import generate, load_model, prefill_chunks
    from tests.helpers.torch_pools import load_config, prompt_tokens as tokens_of

    model = load_model(load_config())
    prompt = prefill_chunks(model, tokens_of(prompt_tokens), chunk_tokens=CHUNK_TOKENS)
    picked: list[Any] = []
    indexers = [module for name, module in model.named_modules() if name.endswith(".compressor.indexer")]
    hooks = [module.register_forward_hook(lambda _, __, picks: picked.append(picks[0, 0])) for module in indexers]
    generate(model, prompt.cache, first_token=prompt.first_token, steps=steps)
    for hook in hooks:
        hook.remove()
    k = int(model.config.index_topk)
    top_k = np.full((steps, len(indexers), k), -1, dtype=np.int16)
    for index, picks in enumerate(picked):
        top_k[index // len(indexers), index % len(indexers), : len(picks)] = picks.numpy()
    tokens = prompt_tokens + 1 + np.arange(steps)
    return Selections(top_k=top_k, rows=(tokens // 4).astype(np.int32))


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for prompt_tokens in RECORDED:
        found = record(prompt_tokens)
        np.savez_compressed(selections_file(prompt_tokens), **found._asdict())


if __name__ == "__main__":
    main()
