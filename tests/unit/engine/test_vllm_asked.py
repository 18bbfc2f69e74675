"""The connector answers what vLLM 0.32 and 0.33 ask, as `tests/vllm/asked.txt` records it from their sources."""

from tests.vllm.asked import ABSTRACT, READ, hook, imported, ours

LEFT_TO_VLLM = {
    "bind_connector_metadata": "keeps what build_connector_meta has returned",
    "bind_kv_cache_manager": "a look into vLLM's cache",
    "clear_connector_metadata": "the end of bind_connector_metadata",
    "finish_forward": "work at the end of a forward pass",
    "get_block_ids_with_load_errors": "failures are told by request, in get_transfer_results",
    "get_external_cache_hit_sources": "counts all loads as peer to peer, by _cache_hit_source",
    "get_finished": "vLLM asks get_transfer_results",
    "get_finished_count": "every worker reports",
    "get_kv_connector_kv_cache_events": "no events of tokens that are kept elsewhere",
    "get_mem_pool_context": "the cache lies where vLLM puts it",
    "handle_preemptions": "decode's transfers are never under way for what vLLM may preempt; prefill's are told in steps",
    "has_connector_metadata": "the state of bind_connector_metadata",
    "register_finished_partial_tail": "blocks move whole",
    "request_finished": "request_finished_all_groups",
    "requires_piecewise_for_cudagraph": "no work between layers",
    "reset_cache": "keeps nothing",
    "reset_capture_state": "no work between layers",
    "set_host_xfer_buffer_ops": "no buffer in host memory",
    "set_xfer_handshake_metadata": "set_xfer_handshake_metadata_pp_aware",
    "supports_sleep_mode": "it does, which is vLLM's answer",
    "take_events": "no events of tokens that are kept elsewhere",
}
"""Hooks with vLLM's own answer, and why that is right."""


def test_every_hook_has_vllm_s_parameters_and_is_answered() -> None:
    asked = {hook(line): line for line in READ if "(" in line}
    assert {line for line in ours().values() if asked.get(hook(line), "").removeprefix(ABSTRACT) != line} == set()
    assert asked.keys() - ours().keys() == LEFT_TO_VLLM.keys()
    assert not {hook(line) for line in READ if line.startswith(ABSTRACT)} & LEFT_TO_VLLM.keys()


def test_everything_that_is_imported_was_there() -> None:
    assert {f"{module}.{name}" for module, name in imported()} <= set(READ)
