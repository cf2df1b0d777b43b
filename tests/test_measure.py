import gc
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

from labutils import measure
from labutils.config import ModelConfig
from labutils.model import GPT
from labutils.world import World

TINY = dict(num_layers=2, d_model=32, num_heads=4, d_ff=128, vocab_size=64, seq_len=16)
LLAMA = dict(ffn="swiglu", norm="rmsnorm", positions="rope", bias=False, tied=False, num_kv_heads=2)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def training(optimizer=torch.optim.AdamW, b=4, attention="plain", **options):
    gpt = GPT(ModelConfig(**TINY, **options), attention=attention)
    stepper = optimizer(gpt.parameters())
    x, y = torch.randint(64, (2, b, 16))

    def step():
        gpt.loss(x, y).backward()
        stepper.step()
        stepper.zero_grad()

    return gpt, stepper, step, (x, y)


@pytest.mark.parametrize(
    "optimizer, state",
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), {}),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {"momentum_buffer": 4}),
        (torch.optim.Adam, {"exp_avg": 4, "exp_avg_sq": 4}),
        (torch.optim.AdamW, {"exp_avg": 4, "exp_avg_sq": 4}),
    ],
)
def test_model_states_are_exact(optimizer, state):
    gpt, stepper, _, (x, y) = training(optimizer)
    psi = gpt.config.num_params
    assert measure.model_states(gpt, stepper).by("name") == {"weights": 4 * psi}
    gpt.loss(x, y).backward()
    assert measure.model_states(gpt, stepper).by("name") == {
        "weights": 4 * psi,
        "gradients": 4 * psi,
    }
    stepper.step()
    expected = {"weights": 4 * psi, "gradients": 4 * psi} | {
        name: size * psi for name, size in state.items()
    }
    if "exp_avg" in state:
        expected["step"] = 4 * len(list(gpt.parameters()))
    measured = measure.model_states(gpt, stepper)
    assert measured.by("name") == expected
    assert measured.only(name="weights").count == len(list(gpt.parameters()))


def test_a_storage_counts_once():
    flat = torch.zeros(10)
    module = nn.Module()
    module.first, module.second = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])
    assert measure.model_states(module).by("component") == {"weights": 40}
    module.register_buffer("view", flat[2:5])
    assert measure.model_states(module).total == 40


def test_master_weights_and_their_gradients_are_found():
    layer = nn.Linear(4, 3, dtype=torch.bfloat16)
    masters = [nn.Parameter(p.detach().float()) for p in layer.parameters()]
    optimizer = torch.optim.Adam(masters)

    def step():
        layer(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        for master, p in zip(masters, layer.parameters(), strict=True):
            master.grad = p.grad.float()
        optimizer.step()

    moments = measure.history(step, layer, optimizer).moments
    held = measure.model_states(layer, optimizer)
    assert held.by("name") == {
        "weights": 30,
        "gradients": 30,
        "fp32 gradients": 60,
        "master weights": 60,
        "exp_avg": 60,
        "exp_avg_sq": 60,
        "step": 8,
    }
    assert moments[0].ledger.by("component")["optimizer"] == 60
    assert moments[-1].ledger.by("component") | {"activations": 0, "buffers": 0} == held.by(
        "component"
    ) | {"activations": 0, "buffers": 0}


def test_saved_activations_of_a_small_network_by_hand():
    layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.ones(2, 4)
    saved = measure.saved_activations(lambda: layers(x).pow(2).mean(), layers)
    assert saved.by("name") == {
        "0": 32,
        "1": 64,
        "outside": 8,
    }  # x; tanh's output, which the next layer keeps too; the squared value


def test_a_gpt2_block_keeps_what_its_formulas_say():
    b, s, h, f, a = 4, 16, 32, 128, 4
    gpt, _, _, (x, y) = training()
    by_name = measure.saved_activations(lambda: gpt.loss(x, y), gpt).by("name")
    block = {
        name.removeprefix("blocks.1."): size
        for name, size in by_name.items()
        if name.startswith("blocks.1.")
    }
    assert block == {
        "attention_norm": 4 * b * s * h
        + 2 * 4 * b * s,  # x, and a mean and a reciprocal deviation a token
        "attention.query": 4 * b * s * h,
        "attention": 3 * 4 * b * s * h + 4 * a * b * s * s,  # q, k, v, the softmax
        "attention.output": 4 * b * s * h,
        "feed_forward_norm": 4 * b * s * h + 2 * 4 * b * s,
        "feed_forward.up": 4 * b * s * h,
        "feed_forward": 4 * b * s * f,
        "feed_forward.down": 4 * b * s * f,
    }


def test_saved_activations_leave_no_hook_behind():
    layers = nn.Sequential(nn.Linear(2, 2))

    def fails():
        layers(torch.ones(1, 2))
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        measure.saved_activations(fails, layers)
    assert not layers[0]._forward_hooks and not layers[0]._forward_pre_hooks


def test_checkpointing_keeps_only_the_inputs():
    layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
    x = torch.ones(4, 8, requires_grad=True)
    plain = measure.saved_activations(lambda: layers(x), layers)
    saved = measure.saved_activations(lambda: checkpoint(layers, x, use_reentrant=False), layers)
    assert plain.total == 3 * 128 and saved.total == 128


@pytest.mark.parametrize("attention", ["plain", "sdpa"])
@pytest.mark.parametrize("options", [{}, LLAMA, dict(dropout=0.1), dict(num_experts=3, top_k=2)])
def test_peaks_of_two_steps_equal_those_of_torchs_tracker(options, attention):
    ours, theirs = [], []
    for peaks in (ours, theirs):
        torch.manual_seed(1)
        gpt, optimizer, step, batch = training(attention=attention, **options)
        for _ in range(2):
            if peaks is ours:
                peaks.append(measure.peak(step, gpt, optimizer).total)
            else:
                tracker = MemTracker()
                tracker.track_external(gpt, optimizer, *batch)
                with tracker:
                    step()
                peaks.append(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
    assert ours == theirs
    assert (
        ours[1] > ours[0]
    )  # the second step carries the optimizer state through its backward pass


def test_history_is_the_same_every_time_and_closes_its_books():
    gpt, optimizer, step, (x, _) = training()
    first, second, third = (measure.history(step, gpt, optimizer) for _ in range(3))
    assert first != second == third
    assert list(second.phases) == ["start", "forward", "backward", "optimizer", "end"]
    states = measure.model_states(gpt, optimizer)
    start, end = (third.moments[i].ledger.by("component") for i in (0, -1))
    batch = x.untyped_storage().nbytes()
    assert end == states.by("component") | {"gradients": 0, "activations": batch, "buffers": 0}
    assert start == end  # the batch, made before, counts from the start


def test_the_forward_pass_ends_with_the_saved_activations():
    gpt, optimizer, step, (x, y) = training()
    forward = [
        moment
        for moment in measure.history(step, gpt, optimizer).moments
        if moment.phase == "forward"
    ]
    saved = measure.saved_activations(lambda: gpt.loss(x, y), gpt)
    assert forward[-1].ledger.by("component")["activations"] == saved.total


def test_gradients_that_are_kept_are_alive_in_the_next_step():
    gpt, optimizer, _, (x, y) = training()
    gpt.loss(x, y).backward()
    start = measure.history(lambda: gpt.loss(x, y).backward(), gpt, optimizer).moments[0]
    assert start.ledger.by("component")["gradients"] == 4 * gpt.config.num_params


def test_a_checkpointed_region_computes_its_activations_again():
    layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)], nn.Tanh())
    x = torch.ones(4, 8, requires_grad=True)
    moments = measure.history(
        lambda: checkpoint(layers, x, use_reentrant=False).sum().backward(), layers
    ).moments

    def most(phase):
        return max(
            moment.ledger.by("component")["activations"]
            for moment in moments
            if moment.phase == phase
        )

    assert (most("forward"), most("backward")) == (128, 5 * 128)


def test_capacity_stops_the_second_step_and_not_the_first():
    gpt, optimizer, step, _ = training(b=32)
    first, second = (measure.peak(step, gpt, optimizer).total for _ in range(2))
    gpt, optimizer, step, _ = training(b=32)
    limit = (first + second) // 2
    measure.history(step, gpt, optimizer, capacity=limit)
    with pytest.raises(
        measure.OutOfMemory,
        match=r"^(forward|backward), \w+: [\d,]+ bytes more than the capacity of [\d.]+ MB would be alive$",
    ):
        measure.history(step, gpt, optimizer, capacity=limit)
    optimizer.zero_grad()
    measure.history(
        step, gpt, optimizer, capacity=second
    )  # the model is usable, and exactly enough is enough
    with pytest.raises(ValueError, match="capacity must be at least 1"):
        measure.history(step, gpt, optimizer, capacity=0)


def test_history_runs_models_that_do_not_fit():
    with FakeTensorMode():
        cfg = ModelConfig.named("gpt3-175b")
        block = GPT(
            ModelConfig(
                num_layers=1, d_model=12288, num_heads=96, d_ff=49152, vocab_size=100, seq_len=2048
            )
        ).blocks[0]
        x = torch.zeros(1, 2048, 12288)
        history = measure.history(lambda: block(x).sum().backward(), block)
    layer = cfg.parameters["attention"] // 96 + cfg.parameters["feed-forward"] // 96 + 2 * 2 * 12288
    assert history.peak.ledger.by("component")["weights"] == 4 * layer


def test_the_garbage_collector_is_left_as_it_was():
    def fails():
        raise RuntimeError("stop")

    during = []
    measure.history(lambda: during.append(gc.isenabled()), nn.Linear(1, 1))
    assert (
        during == [False] and gc.isenabled()
    )  # a cycle that dies some time would make histories differ
    with pytest.raises(RuntimeError, match="stop"):
        measure.history(fails, nn.Linear(1, 1))
    assert gc.isenabled()


# ── on ranks, and told by those who know ──────────────────────────────────────────────────────────


@pytest.mark.parametrize("resize", ["storage", "operation"])
def test_a_resize_is_seen(resize):
    flat = torch.ones(1000)

    def set_size(nbytes):
        if resize == "storage":
            flat.untyped_storage().resize_(nbytes)
        else:
            torch.ops.inductor.resize_storage_bytes_(flat, nbytes)

    def gathers():
        for _ in range(2):
            set_size(4000)
            torch.ones(25)
            set_size(0)

    set_size(0)
    with measure.recording(nn.Module()) as recorder:
        gathers()
    totals = [moment.ledger.total for moment in recorder.history().moments]
    assert totals == [0, 4000, 4100, 0, 4000, 4100, 0, 0]
    lives = [life for life in recorder.lives if life.nbytes == 4000]
    assert [(life.birth, life.death) for life in lives] == [(1, 3), (4, 6)]
    assert "resize_" not in torch.UntypedStorage.__dict__


def test_a_result_that_grows_its_out_is_seen():
    def step():
        out = torch.empty(0)
        torch.add(torch.ones(10), torch.ones(10), out=out)
        return out

    assert measure.peak(step, nn.Module()).total == 120


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_a_graph_that_is_dropped_without_backward_is_freed(k):
    gpt, optimizer, _, (x, y) = training()
    once = measure.history(lambda: gpt.loss(x, y) and None, gpt, optimizer)

    def forwards():
        for _ in range(k):
            gpt.loss(x, y)

    several = measure.history(forwards, gpt, optimizer)
    assert several.peak.ledger == once.peak.ledger
    assert several.moments[-1].ledger == once.moments[-1].ledger


def exchanged(rank, kind):
    comm, x = rank.comm(), torch.ones(2**16)

    def call():
        if kind == "all_reduce":
            return comm.all_reduce(x)
        if kind == "all_gather":
            return comm.all_gather(x)
        return comm.reduce_scatter(x, async_op=True).wait()

    return measure.peak(call, nn.Module()).total


@pytest.mark.parametrize("engine", ["threads", "processes", "dry"])
def test_neither_a_neighbors_tensors_nor_memory_for_messages_counts(engine):
    with World(3, engine=engine) as world:
        for kind, held in {"all_reduce": 2**18, "all_gather": 2**18 * (3 + 1)}.items():
            # What is gathered is read by an operation of this rank, so x counts beside the result.
            alone = [{"rank": rank} for rank in range(3)] if engine == "dry" else [{}]
            for options in alone:
                found = world.run(exchanged, kind, **options)
                assert set(found if engine != "dry" else [found]) <= {held, held - 2**18}


def test_ranks_measure_side_by_side_what_each_does_alone():
    def program(rank, ranks):
        torch.manual_seed(rank.rank)
        gpt, optimizer, step, _ = training(b=rank.rank + 1)
        return measure.history(step, gpt, optimizer) if rank.rank in ranks else None

    together = World(3).run(program, (0, 1, 2))
    for r in range(3):
        assert World(3).run(program, (r,))[r] == together[r]
    assert gc.isenabled()


def test_labels_name_what_is_held_from_the_beginning_to_the_end():
    def step():
        measure.label([layer.weight], "weights", "shards")
        bucket = torch.ones(100)
        measure.label([bucket[:10]], "gradients", "buckets")
        with measure.phase("optimizer"):
            torch.ones(1)
        assert [(life.name, life.nbytes) for life in recorder.current.values()] == [
            ("shards", 24), ("weights", 8), ("buckets", 400),
        ]  # fmt: skip
        return bucket

    layer = nn.Linear(3, 2)
    measure.label([layer.weight], "weights", "nobody listens")
    with measure.recording(layer) as recorder:
        step()
    moments = recorder.history().moments
    assert [moment.phase for moment in moments] == ["start", "forward", "optimizer", "end"]
    assert moments[0].ledger.only(name="shards").total == 24
    assert moments[1].ledger.only(component="gradients", name="buckets").total == 400
    assert moments[-1].ledger.total == 32
    with pytest.raises(ValueError, match="no component 'weight': use one of weights"):
        measure.label([layer.weight], "weight")


def test_the_ledgers_of_a_history_and_of_the_states_have_the_same_lines():
    gpt, optimizer, step, _ = training()
    step()
    end = measure.history(lambda: None, gpt, optimizer).moments[-1].ledger
    assert measure.model_states(gpt, optimizer).diff(end).unexplained == 0


def test_recording_takes_as_long_for_an_operation_however_much_is_alive():
    class Counting(dict):
        looked = 0

        def get(self, key, default=None):
            type(self).looked += 1
            return super().get(key, default)

    def looks(alive):
        kept = []
        with measure.recording(nn.Module()) as recorder:
            recorder.current = Counting(recorder.current)
            Counting.looked = 0
            for _ in range(alive):
                kept.append(torch.ones(1))
            before = Counting.looked
            for _ in range(100):
                kept[0] + kept[1]
        return Counting.looked - before

    assert looks(10) == looks(1000)


def test_counting_what_is_saved_keeps_nothing_alive():
    """Without the collector: a saved output that held its own graph would wait for it."""
    layers, outputs = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid()), []

    def forward():
        out = layers(torch.ones(2, 4))
        outputs.append(weakref.ref(out))
        return out.sum()

    gc.disable()
    try:
        measure.saved_activations(forward, layers)
        assert outputs[0]() is None
    finally:
        gc.enable()


def test_when_the_collector_runs_changes_no_history():
    """Garbage in a cycle: what waits for the collector since before is not counted, and what becomes garbage meanwhile stays, however eager the collector is."""
    layer = nn.Linear(4, 4)

    def step():
        ring = [layer(torch.ones(2, 4))]
        ring.append(ring)
        del ring
        return [[] for _ in range(100)], layer(torch.ones(3, 4))

    seen = measure.history(step, layer)
    ring = [torch.ones(1000)]
    ring.append(ring)
    del ring
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        assert measure.history(step, layer) == seen
    finally:
        gc.set_threshold(*before)
    assert seen.moments[-1].ledger.total > 4 * (4 * 4 + 4)  # the ring is there to the end
