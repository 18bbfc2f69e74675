"""The hot buffer on a GPU: bit by bit what the CPU's does, in graphs, without a wait and without an allocation."""

import numpy as np
import pytest
import torch

from tests.helpers.sparse_simulation import SparseSimulation, c4_component, check_tables, settings

pytestmark = pytest.mark.gpu

FLASH = "deepseek-v4-flash"


def two_worlds(device: int, **facts) -> tuple[SparseSimulation, SparseSimulation]:
    return SparseSimulation(**facts), SparseSimulation(device=f"cuda:{device}", **facts)


def assert_same(cpu: SparseSimulation, gpu: SparseSimulation) -> None:
    for ours, theirs in zip(cpu.answers, gpu.answers, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    theirs = gpu.state()
    for name, table in cpu.state().items():
        np.testing.assert_array_equal(table, theirs[name], err_msg=name)


@pytest.mark.parametrize(("form", "hot_rows"), [("tiny-v4", 64), (FLASH, 256)])
def test_requests_come_and_go_as_on_the_cpu(device, hot_rows, form):
    component = c4_component(form).model_copy(update={"layers": (2, 4)})
    options = settings(hot_rows=hot_rows, top_k=64, max_requests=4)
    cpu, gpu = two_worlds(device, options=options, component=component, host_pages=128, seed=7)
    random = np.random.default_rng(11)
    for turn in range(150):
        for slot in range(4):
            if slot not in cpu.requests and random.random() < 0.3:
                tokens = int(random.integers(0, 1500))
                for world in (cpu, gpu):
                    world.admit(slot, tokens, more_tokens=500)
            elif slot in cpu.requests and (random.random() < 0.01 or not cpu.can_step(slot)):
                for world in (cpu, gpu):
                    world.release(slot)
        batch = [slot for slot in random.permutation(4).tolist() if slot in cpu.requests and random.random() < 0.8]
        for world in (cpu, gpu):
            world.step(batch, padding=4 - len(batch), verify=turn % 10 == 0)
        assert_same(cpu, gpu)
    check_tables(gpu.cache)
    for slot in list(gpu.requests):
        gpu.release(slot)


class CapturedStep:
    def __init__(self, world: SparseSimulation, batch: int) -> None:
        layers, device = world.component.layers, world.device
        self.world, self.batch = world, batch
        k = world.settings.top_k
        self.top_k = torch.full((len(layers), batch, k), -1, dtype=torch.int32, device=device)
        self.rows = torch.zeros(len(layers), batch, world.component.row_bytes, dtype=torch.uint8, device=device)
        self.found = torch.full_like(self.top_k, -9)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.launch()

    def launch(self) -> None:
        for position, layer in enumerate(self.world.component.layers):
            self.world.cache.append(layer, self.rows[position])
            self.world.cache.swap_in(layer, self.top_k[position], self.found[position])

    def fill(self, slots: list[int], layer_position: int, layer: int) -> np.ndarray:
        top_k = self.world.selected(slots, layer, self.batch, self.world.choose)
        self.top_k[layer_position].copy_(torch.from_numpy(top_k))
        self.rows[layer_position].copy_(self.world.new_rows(slots, layer, self.batch))
        return top_k


def test_a_captured_step_is_replayed_for_any_batch(device):
    options = settings(hot_rows=64, top_k=64)
    cpu, gpu = two_worlds(device, options=options, host_pages=128, seed=2)
    for world in (cpu, gpu):
        world.admit(0, 1100, more_tokens=1400)
        world.admit(2, 130, more_tokens=1400)
        world.step([2, 0])  # kernels are loaded before anything is captured
    captured = CapturedStep(gpu, batch=3)
    random = np.random.default_rng(3)
    for turn in range(220):
        if turn == 60:
            for world in (cpu, gpu):
                world.admit(1, 777, more_tokens=1000)
        if turn == 150:
            for world in (cpu, gpu):
                world.release(0)
                world.admit(0, 390, more_tokens=800)
        slots = [slot for slot in random.permutation(3).tolist() if slot in cpu.requests and random.random() < 0.9]
        cpu.step(slots, padding=3 - len(slots))
        entries = []
        for slot in slots:
            gpu.requests[slot].tokens += 1
            entries.append((slot, gpu.requests[slot].rows))
        chosen = [captured.fill(slots, position, layer) for position, layer in enumerate(gpu.component.layers)]
        gpu.cache.begin_step(entries)
        captured.graph.replay()
        gpu.cache.end_step()
        gpu.note_backups(slots)
        gpu.answers = list(captured.found.cpu().numpy())
        assert_same(cpu, gpu)
        for position, layer in enumerate(gpu.component.layers):
            gpu.verify(slots, layer, chosen[position], gpu.answers[position])
    check_tables(gpu.cache)
    for slot in list(gpu.requests):
        gpu.release(slot)


def test_no_verb_waits_for_the_device_or_allocates(device):
    """With the device kept busy, so that a wait would show."""
    world = SparseSimulation(settings(top_k=64), host_pages=160, device=f"cuda:{device}")
    for slot in range(3):
        world.admit(slot, 900, more_tokens=1200)
    world.step([0, 1, 2])
    captured = CapturedStep(world, batch=3)
    captured.top_k.random_(0, 220)
    ids = {slot: world.requests[slot].pages for slot in range(3)}
    rows = {slot: world.requests[slot].rows for slot in range(3)}
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    quiet = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for turn in range(150):
            if turn % 10 == 0:
                torch.cuda._sleep(2_000_000)  # about a millisecond
            for slot in range(3):
                rows[slot] += 1
            world.cache.begin_step(list(rows.items()))
            captured.graph.replay()
            world.cache.end_step()
            if turn == 100:
                quiet.append(world.cache.release(2))
                world.cache.admit(2, ids[2], 60)
                rows[2] = 60
        world.cache.extend(0, ids[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats(device)["allocation.all.allocated"] == before
    for each in quiet:
        each.wait(20)
    check_tables(world.cache)


def test_a_slow_backup_holds_back_only_what_would_overwrite_it(device):
    """The ring page is written again only when its copy is over, though the host enqueues everything at once."""
    world = SparseSimulation(settings(hot_rows=64, top_k=64, max_requests=1), device=f"cuda:{device}", host_pages=64)
    world.admit(0, 0, more_tokens=2400)
    world.step([0])
    for _ in range(4 * 256 + 40):
        if (world.requests[0].tokens + 1) % 256 == 0:  # a page is complete with this step, and its copy is late
            with world.cache._backup_stream.running():
                torch.cuda._sleep(600_000_000)  # about a third of a second: longer than the ring lasts
        world.step([0])
    check_tables(world.cache)  # waits for the device
    world.verify_host(0)


def test_what_is_allocated_is_what_the_accounts_say(device):
    component = c4_component(FLASH)
    options = settings(hot_rows=1024, top_k=512, max_requests=2, max_tokens=131_072)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_stats(device)["allocated_bytes.all.current"]
    world = SparseSimulation(options, component=component, host_pages=8, device=f"cuda:{device}")
    taken = torch.cuda.memory_stats(device)["allocated_bytes.all.current"] - before
    told = world.cache.memory_bytes().total
    assert told <= taken <= told + 16 * 512, "torch rounds each tensor up to 512 bytes"
    world.cache.close()
