"""The hot buffer against a plain model of its rows: what is selected is there, bytes and all."""

import numpy as np
import pytest
import torch

from kvbridge.core.errors import ConflictError, InvalidInputError, NotFoundError, PageOutOfBoundsError
from kvbridge.core.geometry.costs import sparse_request_bytes
from kvbridge.sparse import SparseCache
from tests.helpers.sparse_simulation import HostPool, SparseSimulation, c4_component, check_tables, settings


@pytest.mark.slow
def test_a_long_decode_past_many_evictions_and_backups():
    world = SparseSimulation(settings(hot_rows=64, top_k=64, max_requests=1))
    world.admit(0, 1000, more_tokens=1200)
    for _ in range(1100):
        world.step([0])
    check_tables(world.cache)
    world.verify_host(0)
    counts = world.cache.counts(0)
    assert counts.resident == 64 * 2
    assert counts.evicted > 500
    assert world.requests[0].complete_rows_on_host == 2100 // 4 // 64 * 64
    told = world.release(0).rows()
    assert (told.preloaded, told.hit + told.loaded > 500) == (0, True)
    assert told.backed_up == (2100 // 4 // 64 - 1000 // 4 // 64) * 64 * 2  # new pages that are complete, in two layers


def test_what_it_takes_is_what_the_accounts_say():
    options = settings(max_requests=5)
    world = SparseSimulation(options)
    by_part, each = world.cache.memory_bytes(), sparse_request_bytes(options, world.component, layer_count=2)
    memory = world.cache.memory
    constants = memory.numbers.nbytes + memory.short_numbers.nbytes
    expected = {part: 5 * size for part, size in each.model_dump().items()}
    expected["steps"] += constants
    assert by_part.model_dump() == expected
    tensors = [value for value in vars(memory).values() if isinstance(value, torch.Tensor)]
    assert by_part.total == sum(tensor.nbytes for tensor in tensors)


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


@pytest.mark.parametrize(
    ("ids", "rows", "error", "match"),
    [
        (pages(1), 65, InvalidInputError, "65 rows lie in 2 host pages, the page table names 1"),
        (pages(*range(20)), 1025, InvalidInputError, "1025 rows, the hot buffer's tables hold 1024"),
        (pages(*range(17)), 10, InvalidInputError, "17 host pages, the hot buffer's tables hold 16"),
        (pages(1, 1), 10, InvalidInputError, "distinct"),
        (pages(-1), 10, InvalidInputError, "not negative"),
        (pages(96), 10, PageOutOfBoundsError, "host page 96 does not exist: the host pool has 96 pages"),
        (np.array([1], dtype=np.int64), 10, InvalidInputError, "int32"),
    ],
)
def test_an_admission_that_cannot_be_is_refused_and_leaves_nothing(ids, rows, error, match):
    world = SparseSimulation()
    with pytest.raises(error, match=match):
        world.cache.admit(0, ids, rows)
    assert len(world.cache.requests) == 0
    world.admit(0, 100)


def test_a_step_whose_page_has_no_host_page_is_refused_before_it_begins():
    world = SparseSimulation()
    world.cache.admit(0, pages(3), 63)
    world.cache.begin_step([(0, 64)])
    world.cache.end_step()
    for rows in range(65, 128):
        world.cache.begin_step([(0, rows)])
        world.cache.end_step()
    with pytest.raises(
        InvalidInputError, match="logical page 1 is to be written to the host, but its page table names only 1"
    ):
        world.cache.begin_step([(0, 128)])
    world.cache.extend(0, pages(3, 9))
    world.cache.begin_step([(0, 128)])
    world.cache.end_step()


def test_a_refused_step_changes_nothing():
    world = SparseSimulation()
    world.admit(0, 100)
    world.admit(1, 100)
    for entries, error in (
        ([(0, 26), (1, 27)], InvalidInputError),
        ([(0, 26), (2, 1)], NotFoundError),
        ([(0, 26), (0, 26)], InvalidInputError),
    ):
        with pytest.raises(error):
            world.cache.begin_step(entries)
    world.step([0, 1])


def test_verbs_in_the_wrong_order_are_refused():
    world = SparseSimulation()
    world.admit(0, 100)
    with pytest.raises(ConflictError, match="no step is under way"):
        world.cache.end_step()
    world.cache.begin_step([(0, 25)])
    for call in (
        lambda: world.cache.begin_step([(0, 25)]),
        lambda: world.cache.release(0),
        lambda: world.cache.extend(0, world.requests[0].pages),
    ):
        with pytest.raises(ConflictError):
            call()
    world.cache.end_step()
    world.release(0)
    with pytest.raises(NotFoundError, match="request slot 0 holds no request"):
        world.cache.begin_step([(0, 25)])


def test_a_page_table_must_go_on_from_the_one_before():
    world = SparseSimulation()
    world.cache.admit(0, pages(3, 4), 70)
    for wrong in (pages(3), pages(4, 3, 5)):
        with pytest.raises(InvalidInputError, match="must begin with the 2 that it has"):
            world.cache.extend(0, wrong)


def test_tensors_of_another_form_are_refused():
    world = SparseSimulation()
    world.admit(0, 100)
    world.cache.begin_step([(0, 25)])
    with pytest.raises(InvalidInputError, match="fill up with -1"):
        world.cache.swap_in(2, torch.zeros(1, 47, dtype=torch.int32))
    with pytest.raises(InvalidInputError, match="int64"):
        world.cache.swap_in(2, torch.zeros(1, 48, dtype=torch.int64))
    with pytest.raises(InvalidInputError, match="new rows are"):
        world.cache.append(2, torch.zeros(1, 10, dtype=torch.uint8))
    with pytest.raises(InvalidInputError, match="batch of at most 3"):
        world.cache.append(2, torch.zeros(4, 104, dtype=torch.uint8))
    with pytest.raises(NotFoundError, match="layer 3 has no c4_kv here"):
        world.cache.swap_in(3, torch.zeros(1, 48, dtype=torch.int32))


def test_regions_that_are_not_the_components_are_refused():
    component, pool = c4_component(), HostPool(c4_component(), 4)
    cpu = torch.device("cpu")
    with pytest.raises(InvalidInputError, match="got none"):
        SparseCache(settings(), component, [], cpu)
    with pytest.raises(InvalidInputError, match="named twice"):
        SparseCache(settings(), component, [pool.regions[0]] * 2, cpu)
    with pytest.raises(InvalidInputError, match="pages of 6720 bytes, not 37440"):
        SparseCache(settings(), c4_component("deepseek-v4-flash"), pool.regions, cpu)
    with pytest.raises(InvalidInputError, match="'cpu' or 'cuda:N'"):
        SparseCache(settings(), component, pool.regions, torch.device("meta"))
