"""KV events of kvbridge's nodes, as the engine's own decoder reads them."""

from tests.engines.kv_events import check
from tests.engines.servers import Setup


def test_the_decoder_of_the_engine_reads_events_of_real_nodes(setup: Setup) -> None:
    check(setup, "vllm.distributed.kv_events", checkpoints=True)
