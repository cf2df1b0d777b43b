"""The caching allocator: the documented rules one by one, what must hold after any sequence of requests, and traces."""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labutils import measure, units
from labutils.config import ModelConfig
from labutils.memory import allocator
from labutils.memory.allocator import Allocator, OutOfMemory, replay
from labutils.model import GPT

MIB, GIB = units.MIB, units.GIB


def sizes(gpu):
    return [[(block.state, block.size) for block in segment] for segment in gpu.segments]


@pytest.mark.parametrize(
    "nbytes, segment, used",
    [
        (1, 2 * MIB, 512),  # rounded up to 512
        (513, 2 * MIB, 1024),
        (MIB, 2 * MIB, MIB),  # the largest small one
        (MIB + 1, 20 * MIB, MIB + 512),  # the smallest large one
        (10 * MIB - 512, 20 * MIB, 10 * MIB - 512),
        (
            10 * MIB - 1,
            10 * MIB,
            10 * MIB,
        ),  # rounded to 512 first: 10 MiB, which has a segment of its own
        (
            10 * MIB + 1,
            12 * MIB,
            10 * MIB + 512,
        ),  # the rest of the segment is more than 1 MiB: split
        (11 * MIB, 12 * MIB, 12 * MIB),  # a rest of exactly 1 MiB is not
    ],
)
def test_rounding_and_segments(nbytes, segment, used):
    gpu = Allocator(GIB)
    assert gpu.largest_free == 0
    gpu.alloc(nbytes)
    assert (gpu.reserved, gpu.allocated, gpu.requested) == (segment, used, nbytes)


def test_the_smallest_block_that_holds_it_is_taken():
    gpu = Allocator(GIB)
    holes = [gpu.alloc(size * MIB) for size in (40, 12, 30)]
    for hole in holes:
        gpu.free(hole)
    assert gpu.alloc(13 * MIB) == holes[2]  # 30 MiB, not 40
    assert gpu.alloc(12 * MIB) == holes[1]  # exactly
    assert gpu.alloc(18 * MIB) == holes[0]  # 17 MiB are left of 30: too little
    assert gpu.reserved == 82 * MIB


def test_small_and_large_never_share():
    gpu = Allocator(GIB)
    gpu.free(gpu.alloc(100 * MIB))
    gpu.alloc(1000)
    assert sizes(gpu) == [[("free", 100 * MIB)], [("used", 1024), ("free", 2 * MIB - 1024)]]


def test_small_blocks_split_to_the_last_512_and_large_ones_keep_a_mebibyte():
    gpu = Allocator(GIB)
    gpu.alloc(MIB)
    gpu.alloc(MIB - 512)
    assert sizes(gpu)[0][-1] == ("free", 512)
    large = Allocator(GIB)
    large.free(large.alloc(30 * MIB))
    large.alloc(29 * MIB)
    assert sizes(large) == [[("used", 30 * MIB)]]


def test_free_neighbors_become_one():
    gpu = Allocator(GIB)
    first, second, third = (gpu.alloc(5 * MIB) for _ in range(3))
    gpu.free(first)
    gpu.free(third)
    assert [size // MIB for _, size in sizes(gpu)[0]] == [5, 5, 10]
    gpu.free(second)
    assert sizes(gpu) == [[("free", 20 * MIB)]]


def test_cached_segments_go_back_before_it_fails():
    gpu = Allocator(100 * MIB)
    gpu.free(gpu.alloc(60 * MIB))
    gpu.alloc(70 * MIB)
    assert gpu.reserved == 70 * MIB


def test_it_fails_with_most_of_the_memory_free():
    gpu = Allocator(10 * GIB)
    gpu.free(gpu.alloc(6 * GIB))
    gpu.alloc(GIB)  # moves into the hole: the segment cannot go back any more
    with pytest.raises(
        OutOfMemory,
        match=r"no room for 6.00 GiB: 1.00 GiB of 10.0 GiB are allocated, 5.00 GiB are reserved but unallocated",
    ):
        gpu.alloc(6 * GIB)
    assert gpu.capacity - gpu.allocated == 9 * GIB


@pytest.mark.parametrize("options", [dict(max_split_size=2 * GIB), dict(expandable_segments=True)])
def test_both_remedies_help(options):
    gpu = Allocator(10 * GIB, **options)
    gpu.free(gpu.alloc(6 * GIB))
    gpu.alloc(GIB)
    gpu.alloc(6 * GIB)
    assert gpu.allocated == 7 * GIB


def test_oversize_blocks():
    gpu = Allocator(GIB, max_split_size=100 * MIB)
    hole = gpu.alloc(200 * MIB)
    gpu.free(hole)
    assert gpu.alloc(99 * MIB) != hole  # a small request does not break a large block
    assert gpu.alloc(181 * MIB) == hole  # a request within 20 MiB takes it whole
    assert gpu.allocated == (99 + 1 + 200) * MIB


def test_expandable_segments_grow_by_pages_and_give_pages_back():
    gpu = Allocator(200 * MIB, expandable_segments=True)
    first = gpu.alloc(30 * MIB)
    assert gpu.reserved == 40 * MIB
    second = gpu.alloc(50 * MIB)  # 10 MiB were left of the second page
    assert gpu.reserved == 80 * MIB and len(gpu.segments) == 1
    gpu.free(first)
    gpu.empty_cache()
    assert gpu.reserved == 60 * MIB  # one page is free from end to end
    assert gpu.alloc(100 * MIB) > second  # the rest of the hole is too small
    assert gpu.alloc(30 * MIB) == first  # and is filled again
    gpu.alloc(1)
    assert len(gpu.segments) == 2


def test_pages_are_given_back_wherever_the_addresses_of_a_pool_begin():
    gpu = Allocator(200 * MIB, expandable_segments=True)
    gpu.alloc(1)  # the other pool comes first
    low, middle, _ = (gpu.alloc(size * MIB) for size in (5, 60, 5))
    gpu.free(middle)  # from 5 to 65 MiB: the pages from 20 to 60 are free from end to end
    gpu.empty_cache()
    assert low > 0 and gpu.reserved == (2 + 80 - 40) * MIB
    assert [(state, size // MIB) for state, size in sizes(gpu)[1][:5]] == [
        ("used", 5), ("free", 15), ("unmapped", 40), ("free", 5), ("used", 5)
    ]  # fmt: skip
    assert gpu.alloc(15 * MIB) == middle


def test_of_equal_blocks_the_first_is_taken():
    gpu = Allocator(200 * MIB, expandable_segments=True)
    pages = [gpu.alloc(20 * MIB) for _ in range(4)]
    gpu.free(pages[0])
    gpu.free(pages[2])
    assert gpu.alloc(20 * MIB) == pages[0]


REQUESTS = st.one_of(
    st.integers(1, 4096),
    st.integers(1, 3 * MIB),
    st.integers(MIB, 60 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 10 * MIB, 20 * MIB]),
)
MODES = [dict(), dict(max_split_size=21 * MIB), dict(expandable_segments=True)]


def check_books(gpu, live):
    used = free = 0
    addresses = []
    for segment in gpu.segments:
        assert all(block.segment is segment for block in segment)
        assert len({block.pool for block in segment}) == 1
        for left, right in itertools.pairwise(segment):
            assert left.address + left.size == right.address, "a gap or an overlap"
            assert left.state != right.state or left.state == "used", (
                "neighbors that should have joined"
            )
        for block in segment:
            assert block.size > 0 and block.size % 512 == 0
            addresses.append((block.address, block.address + block.size))
            if block.state == "used":
                used += block.size
                assert live[block.address] == block.requested <= block.size
            elif block.state == "free":
                free += block.size
    addresses.sort()
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(addresses))
    assert (used, used + free, sum(live.values())) == (gpu.allocated, gpu.reserved, gpu.requested)
    assert (
        used + free <= gpu.capacity
        and gpu.peak_allocated >= used
        and gpu.peak_reserved >= gpu.reserved
    )
    cached = [entry for entries in gpu._free.values() for entry in entries]
    assert {id(block) for block in cached} == {
        id(block) for segment in gpu.segments for block in segment if block.state == "free"
    }
    for blocks in gpu._free.values():
        assert blocks == sorted(blocks, key=lambda block: (block.size, block.address))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(MODES),
    st.lists(st.one_of(REQUESTS, st.floats(0, 0.999), st.none()), max_size=60),
)
def test_the_books_are_right_after_every_request(mode, program):
    gpu, live = Allocator(256 * MIB, **mode), {}
    for step in program:
        if isinstance(step, int):
            try:
                address = gpu.alloc(step)
            except OutOfMemory:
                size, small = -(-step // 512) * 512, step <= MIB
                assert all(
                    block.size < size
                    for segment in gpu.segments
                    for block in segment
                    if block.state == "free" and (block.pool == "small") == small
                )
            else:
                assert address not in live
                live[address] = step
        elif step is None:
            gpu.empty_cache()
        elif live:
            address = sorted(live)[int(step * len(live))]
            del live[address]
            gpu.free(address)
        check_books(gpu, live)
    for address in list(live):
        gpu.free(address)
    gpu.empty_cache()
    assert gpu.reserved == gpu.allocated == gpu.requested == 0
    assert gpu.alloc(200 * MIB) >= 0, "an empty device has room for what fits"


def test_without_splitting_below_the_limit_nothing_fragments():
    draw = random.Random(0)
    gpu, live = Allocator(GIB), []
    for _ in range(2000):  # one size only: every hole fits every request
        if live and draw.random() < 0.5:
            gpu.free(live.pop(draw.randrange(len(live))))
        elif len(live) < 60:
            live.append(gpu.alloc(12 * MIB))
    assert gpu.peak_reserved == gpu.peak_allocated


def test_lives_are_replayed():
    lives = [
        measure.Life(3 * MIB, 0, 2, "weights"),
        measure.Life(1000, 1, None, "buffers"),
        measure.Life(0, 1, None, "buffers"),
        measure.Life(5 * MIB, 2, None, "buffers"),  # finds the room of what died before it
    ]
    history = replay(lives, Allocator(GIB))
    names = [(moment.event, moment.ledger.by("name")) for moment in history.moments]
    assert names == [
        ("weights", {"allocated": 3 * MIB, "rounding": 0, "cached": 17 * MIB}),
        ("buffers", {"allocated": 3 * MIB + 1000, "rounding": 24, "cached": 19 * MIB - 1024}),
        ("weights", {"allocated": 1000, "rounding": 24, "cached": 22 * MIB - 1024}),
        ("buffers", {"allocated": 5 * MIB + 1000, "rounding": 24, "cached": 17 * MIB - 1024}),
    ]
    with pytest.raises(OutOfMemory):
        replay([measure.Life(2 * GIB, 0)], Allocator(GIB))
    later, earlier = measure.Life(600 * MIB, 1), measure.Life(600 * MIB, 0, 1)
    for lives in ([earlier, later], [later, earlier]):  # in whatever order they are told
        assert len(replay(lives, Allocator(GIB)).moments) == 3


def test_a_measured_step_is_replayed():
    config = ModelConfig(num_layers=2, d_model=32, num_heads=2, d_ff=128, vocab_size=50, seq_len=16)
    model, tokens = GPT(config), torch.zeros(4, 16, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model.loss(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    measured = measure.history(step, model, optimizer).peak.ledger.total
    gpu = Allocator(GIB)
    history = replay(measure.storages(step, model, optimizer), gpu)
    assert max(moment.ledger.by("name")["allocated"] for moment in history.moments) == measured
    assert (
        gpu.peak_reserved % (2 * MIB) == 0 and gpu.peak_reserved >= gpu.peak_allocated >= measured
    )
    assert gpu.requested == measure.model_states(model, optimizer).total + tokens.nbytes


@pytest.mark.parametrize(
    "wrong, error, message",
    [
        (lambda: Allocator(0), ValueError, "capacity must be at least 1"),
        (lambda: Allocator(1.5), TypeError, "capacity"),
        (lambda: Allocator(GIB, max_split_size=20 * MIB), ValueError, "made to be split"),
        (
            lambda: Allocator(GIB, max_split_size=GIB, expandable_segments=True),
            ValueError,
            "not both",
        ),
        (lambda: Allocator(GIB).alloc(0), ValueError, "nbytes must be at least 1"),
        (lambda: Allocator(GIB).free(512), ValueError, "nothing is allocated at address 512"),
        (
            lambda: (lambda gpu: [gpu.free(address) for address in [gpu.alloc(5)] * 2])(
                Allocator(GIB)
            ),
            ValueError,
            "freed before",
        ),
    ],
)
def test_bad_input_is_named(wrong, error, message):
    with pytest.raises(error, match=message):
        wrong()


def test_it_says_what_it_holds():
    gpu = Allocator(GIB)
    gpu.alloc(5 * MIB, "weights")
    assert (
        repr(gpu)
        == "Allocator: 5.00 MiB allocated, 20.0 MiB reserved of 1.00 GiB, largest free block 15.0 MiB"
    )
    assert gpu.segments[0][0].name == "weights" and allocator.ALIGNMENT == 512
