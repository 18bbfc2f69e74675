"""A request that one engine prefills and another decodes gives the very logits of one engine alone; so does a known prefix."""

import numpy as np
import pytest
import torch

from kvbridge.core.errors import ConflictError, InvalidInputError
from kvbridge.core.geometry.components import ComponentKind, Encoding
from kvbridge.core.geometry.models import geometry_from_config
from kvbridge.core.geometry.pages import first_window_page
from kvbridge.core.ids import IndexSpace, PageTable
from tests.helpers.matrices import one_in
from tests.helpers.torch_pools import Form, Pools, copy_request, engine_of, make_pools, part

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

from kvbridge.engine import DecodeRoom, PrefillRoom
from kvbridge.engine.adapters.deepseek_v4 import CacheCodec, read_parts, reencoded
from kvbridge.engine.adapters.transformers import generate, load_model, prefill_chunks
from tests.helpers.torch_pools import follow, load_config, prompt_tokens

PAGE, CHUNK, STEPS = 256, 100, 6
HOST = frozenset({ComponentKind.C4_KV})
LENGTHS = [1, 2, 3, 4, 127, 5, 7, 128, 8, 126, 129, 130, 255, 256, 258, 259, 257, 379, 384, 511, 512, 513]
SMALL = load_config() | {
    "num_hidden_layers": 5,
    "layer_types": [
        "compressed_sparse_attention",
        "sliding_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 8, "heavily_compressed_attention": 32},
    "sliding_window": 48,
    "head_dim": 64,
    "partial_rotary_factor": 0.25,
    "index_head_dim": 32,
    "index_topk": 8,
    "mlp_layer_types": ["moe"] * 5,
}


class Engine:
    def __init__(self, config, encoding=Encoding.NATIVE):
        self.model = load_model(config, seed=3)
        self.geometry = geometry_from_config(config, encoding=encoding)
        self.codec = CacheCodec(self.geometry, self.model)

    def stages(self, tokens: int) -> list[Pools]:
        """Pools of two pipeline stages, whose tables are the same."""
        half, count = self.geometry.layer_count // 2, self.geometry.layer_count
        forms = [Form(layers=list(layers)) for layers in (range(half), range(half, count))]
        return [make_pools(self.geometry, tokens=tokens, form=form) for form in forms]

    def prefill(self, stages, tables, tokens, *, chunk=CHUNK, computed=0, checkpoints=None):
        """Compute a prompt, from a checkpoint of `computed` tokens if that is not 0, and write each chunk."""
        checkpoints = checkpoints or {}
        start = {"held_by_prefill": computed, "_published": computed, "checkpoints": checkpoints}
        restore = {"restore": checkpoints[computed]} if computed else {}
        room = PrefillRoom(engine_of(*stages), 1, 1, len(tokens), tables, **start, **restore)
        written = []

        def write(cache, upto):
            self.codec.write(cache, room.final_parts(upto))
            if upto in checkpoints:
                self.codec.write(cache, room.checkpoint_parts(upto))
                written.append(upto)
            room.publish(upto)

        cache = self.codec.decode(computed, read_parts(room.restored_parts())) if computed else None
        made = prefill_chunks(self.model, tokens, chunk_tokens=chunk, on_chunk=write, cache=cache)
        assert written == [end for end in checkpoints if computed < end and end % chunk == 0]
        return made

    def moved(self, tokens, *, chunk=CHUNK):
        """Prefill on two stages, move, unpack: (the prefill, decode's cache)."""
        sources = self.stages(len(tokens))
        made = self.prefill(sources, sources[0].tables, tokens, chunk=chunk)
        form = Form(host=HOST, page_first=True, extent_pages=2)
        target = make_pools(self.geometry, tokens=len(tokens), seed=9, form=form)
        for source in sources:
            copy_request(self.geometry, source, target, tokens=len(tokens))
        return made, self.codec.decode(len(tokens), read_parts(claimed([target], len(tokens)).parts()))


def claimed(stages, tokens, tables=None) -> DecodeRoom:
    return DecodeRoom(engine_of(*stages), 1, 1, tokens, tables or stages[0].tables)


@pytest.fixture(scope="module", autouse=True)
def restore_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny():
    return Engine(load_config())


@pytest.fixture(scope="module")
def small():
    return Engine(SMALL)


def assert_decodes_alike(engine, made, cache, *, steps=STEPS) -> None:
    ours, theirs = (
        generate(engine.model, each, first_token=made.first_token, steps=steps) for each in (made.cache, cache)
    )
    assert ours.tokens == theirs.tokens
    assert torch.equal(ours.logits, theirs.logits)


@pytest.mark.parametrize("length", one_in(4, LENGTHS))
def test_decode_continues_bit_for_bit(tiny, length):
    made, cache = tiny.moved(prompt_tokens(length))
    assert list(map(form_of, made.cache.layers)) == list(map(form_of, cache.layers))
    assert_decodes_alike(tiny, made, cache)


def form_of(layer):
    form = {}
    for name, value in sorted(vars(layer).items()):
        entries = value.items() if isinstance(value, dict) else [("", value)]
        for key, inner in entries:
            is_tensor = isinstance(inner, torch.Tensor)
            form[name, key] = (tuple(inner.shape), inner.dtype, inner.tolist()) if is_tensor else inner
    return form


@pytest.mark.parametrize("length", one_in(3, [1, 7, 8, 9, 47, 33, 31, 48, 49, 257, 255, 256, 264, 300]))
def test_other_rates_windows_and_layer_patterns(small, length):
    made, cache = small.moved(prompt_tokens(length, offset=50), chunk=37)
    # Long enough to close blocks of both compressors after the hand-over.
    assert_decodes_alike(small, made, cache, steps=40)


@pytest.mark.parametrize("kind", list(ComponentKind)[:7])
def test_every_component_decides_the_logits(tiny, kind):
    """A transfer that loses one component must not pass for a good one."""
    length = 507  # both compressors close a block within the steps, and there are more entries than the indexer picks
    source = make_pools(tiny.geometry, tokens=length)
    made = tiny.prefill([source], source.tables, prompt_tokens(length))
    component = tiny.geometry.component(kind)
    rows = component.live_rows(length)
    for layer in component.layers:
        nothing = torch.zeros((rows.count, component.row_bytes), dtype=torch.uint8)
        part(source.views, source.tables, kind, layer, rows.start, rows.stop).write(nothing)
    ours = generate(tiny.model, made.cache, first_token=made.first_token, steps=STEPS)
    cache = tiny.codec.decode(length, read_parts(claimed([source], length).parts()))
    assert not torch.equal(ours.logits, follow(tiny.model, cache, tokens=ours.tokens))


@pytest.mark.parametrize("length", one_in(3, [130, 2, 1027]))
def test_fp8_pages_equal_an_encoded_cache_and_stay_close_to_the_model(length):
    engine = Engine(load_config(), Encoding.FP8_V4)
    assert engine.geometry.component(ComponentKind.C4_KV).row_parts_bytes == (576, 8)
    made, cache = engine.moved(prompt_tokens(length), chunk=512)
    encoded = reencoded(engine.codec, made.cache)
    exact = generate(engine.model, made.cache, first_token=made.first_token, steps=24)
    theirs = follow(engine.model, cache, tokens=exact.tokens)
    assert torch.equal(follow(engine.model, encoded, tokens=exact.tokens), theirs)
    assert not torch.equal(exact.logits, theirs)
    ours, theirs = (torch.log_softmax(logits.double(), dim=-1) for logits in (exact.logits, theirs))
    assert float((ours.exp() * (ours - theirs)).sum(dim=-1).mean()) < 0.05, "mean Kullback-Leibler divergence in nats"


def test_weights_depend_on_the_seed_alone():
    one = load_model(SMALL, seed=1)
    torch.manual_seed(99)
    for seed in (1, 2):
        same = map(torch.equal, load_model(SMALL, seed=seed).state_dict().values(), one.state_dict().values())
        assert all(same) == (seed == 1)


def tables_of(stage: Pools, pages: list[int], window: list[int], tokens: int):
    """A request's tables: growing pages, and windows or a checkpoint of so many tokens."""
    first = first_window_page(stage.geometry, tokens)
    full = PageTable(IndexSpace.FULL, np.array(pages, np.int32), 0)
    return stage.tables | {
        IndexSpace.FULL: full,
        IndexSpace.SWA: PageTable(IndexSpace.SWA, np.array(window, np.int32), first),
    }


@pytest.mark.parametrize("beyond", one_in(3, [1, 255, 0, 3, 128]))
def test_a_hit_equals_a_cold_run(tiny, beyond):
    """Every logit and every row, whichever page end it starts at, though other bytes are in its own windows."""
    tokens = prompt_tokens(2 * PAGE + (beyond or PAGE), offset=13 * beyond)
    length, stages = len(tokens), tiny.stages(8 * PAGE)
    checkpoints = {end: tables_of(stages[0], [0, 1, 2], [1 + end // PAGE], end) for end in (PAGE, 2 * PAGE)}
    tables = tables_of(stages[0], [0, 1, 2], [0, 1], length)
    cold = tiny.prefill(stages, tables, tokens, chunk=PAGE, checkpoints=checkpoints)
    rows = rows_of(stages, tables, length)
    answer = generate(tiny.model, cold.cache, first_token=cold.first_token, steps=STEPS)
    for end in checkpoints:
        own = [0, 1, 2][: end // PAGE] + [3, 4, 5][end // PAGE :]
        again = tables_of(stages[0], own, [0, 1], length)
        spoil_windows(tiny, stages, [0, 1])
        hit = tiny.prefill(stages, again, tokens, chunk=PAGE, computed=end, checkpoints=checkpoints)
        assert torch.equal(hit.logits, cold.logits)
        assert all(map(torch.equal, rows_of(stages, again, length), rows))
        theirs = generate(tiny.model, hit.cache, first_token=hit.first_token, steps=STEPS)
        assert torch.equal(theirs.logits, answer.logits)


def spoil_windows(engine, stages: list[Pools], ids: list[int]) -> None:
    for component in engine.geometry.components:
        for stage in stages if component.space is IndexSpace.SWA else ():
            for layer in stage.views.layers(component.kind):
                for page in ids:
                    stage.views.region(component.kind, layer, space=component.space).page(page).fill_(0x5C)


def rows_of(stages, tables, tokens: int) -> list[torch.Tensor]:
    return [each.read() for each in claimed(stages, tokens, tables).parts()]


def test_what_does_not_fit_is_refused(tiny, small):
    first, _ = small.stages(40)
    with pytest.raises(InvalidInputError, match="no rank here holds swa_kv layer 2"):
        small.codec.decode(20, read_parts(claimed([first], 20).parts()))
    with pytest.raises(InvalidInputError, match="a cache of 0 tokens"):
        small.codec.decode(0, read_parts(()))
    cache = prefill_chunks(small.model, prompt_tokens(40), chunk_tokens=40).cache
    with pytest.raises(ConflictError, match=r"a cache of 40 tokens does not hold all of rows \[0, 41\)"):
        small.codec.encode(cache, small.geometry.component(ComponentKind.SWA_KV), 0, start=0, stop=41)
    with pytest.raises(InvalidInputError, match="longer than the 40 tokens that are computed"):
        prefill_chunks(small.model, prompt_tokens(40), chunk_tokens=40, cache=cache)
    with pytest.raises(InvalidInputError, match="layer_types"):
        CacheCodec(small.geometry, tiny.model)
    with pytest.raises(InvalidInputError, match="window of 64"):
        CacheCodec(geometry_from_config({**SMALL, "sliding_window": 64}), small.model)
    with pytest.raises(InvalidInputError, match="dtype"):
        CacheCodec(geometry_from_config(SMALL, native_dtype_bytes=2), small.model)
