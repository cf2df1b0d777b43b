"""Data parallelism: every way equals one device, sends what its formula says, holds what it must, and says what is wrong."""

import contextlib
import functools
import gc
import itertools
import weakref

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DistributedSampler

from labutils import collectives, data_parallel, measure, predict
from labutils.accumulation import micro_batches
from labutils.config import Link, ModelConfig, TrainConfig
from labutils.ledger import Ledger
from labutils.model import GPT
from labutils.precision import LossScaler, autocast
from labutils.teach import rigs
from labutils.world import DeadlockError, MismatchError, RankError, World

CONFIG = ModelConfig(
    num_layers=2, d_model=16, num_heads=2, d_ff=32, vocab_size=31, seq_len=8, tied=True
)
ROWS = tuple(
    torch.randint(31, (24, 8), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)
)


def model(seed=0, dtype=torch.float64, frozen=True):
    net = GPT(CONFIG, generator=torch.Generator().manual_seed(seed)).to(dtype)
    net.positions.weight.requires_grad_(not frozen)
    return net


def entropy(outputs, targets):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def mine(rank):
    return tuple(side[rank.rank :: rank.size] for side in ROWS)


def weights(net):
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def trained(rank, steps=3, micro=1, quiet=True, dtype=torch.float64, **options):
    """Weights, gradients, buckets and the last loss after some steps of AdamW, every rank with weights of its own before."""
    net = model(rank.rank, dtype)
    replica = data_parallel.replicate(net, rank.comm("dp"), **options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        losses = []
        for k, (inputs, targets) in enumerate(
            micro_batches(mine(rank), len(mine(rank)[0]) // micro)
        ):
            with replica.no_sync() if quiet and k + 1 < micro else contextlib.nullcontext():
                losses.append(entropy(replica(inputs), targets) / micro)
                losses[-1].backward()
        optimizer.step()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in net.named_parameters()
        if parameter.grad is not None
    }
    return weights(net), gradients, replica.buckets, sum(losses).item()


@functools.cache
def alone(steps=3, dtype=torch.float64):
    net = model(0, dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = entropy(net(ROWS[0]), ROWS[1])
        loss.backward()
        optimizer.step()
    return (
        weights(net),
        {
            name: parameter.grad
            for name, parameter in net.named_parameters()
            if parameter.grad is not None
        },
        loss.item(),
    )


def sent_of(algorithm, tensors, n):
    """Bytes of a collective of each tensor of so many bytes, whose elements have so many."""
    name = algorithm.rpartition("_")[0]
    each = (dict(nbytes=nbytes, itemsize=itemsize) for nbytes, itemsize in tensors)
    ledgers = (collectives.sent(algorithm, n=n, name=name, **one) for one in each)
    return Ledger(line for ledger in ledgers for line in ledger).merged()


def reduced(grouped, n):
    """What ranks send to reduce these buckets."""
    return sent_of("all_reduce_ring", [(b.nbytes, b.itemsize) for b in grouped], n)


def started(net, n):
    """What ranks send to start as replicas: rank 0's tensors."""
    tensors = [(x.nbytes, x.itemsize) for x in (*net.parameters(), *net.buffers())]
    return sent_of("broadcast_tree", tensors, n)


@pytest.fixture(scope="module", params=["threads", "processes"])
def engine(request):
    return request.param


@pytest.fixture(scope="module")
def four(engine):
    with World(4, engine) as world:
        yield world


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("bucket_bytes", [1, 5000, 10**6])
def test_equal_to_one_device_and_bytes_sent(size, bucket_bytes):
    with World(size) as world:
        check(world, bucket_bytes=bucket_bytes)


@pytest.mark.parametrize("overlap", [True, False])
def test_equal_to_one_device_and_bytes_sent_on_both_engines(four, overlap):
    check(four, bucket_bytes=5000, overlap=overlap)


def check(world, **options):
    """Loss, weights and gradients are those of one device, and every message is accounted for: those of the start and of the steps."""
    expected, gradients, loss = alone()
    results = world.run(trained, **options)
    assert sum(found for *_, found in results) / world.size == pytest.approx(loss, rel=0, abs=1e-10)
    for found, means, _, _ in results:
        assert torch.allclose(found, expected, rtol=0, atol=1e-10)
        assert means.keys() == gradients.keys() and "positions.weight" not in means
        assert all(
            torch.allclose(means[name], gradients[name], rtol=0, atol=1e-10) for name in means
        )
        assert torch.equal(found, results[0][0]), "replicas that differ in a bit drift apart"
    predicted = reduced(results[0][2], world.size).scaled(3) + started(model(), world.size)
    assert predicted.diff(world.ledger).unexplained == 0 and predicted.count == world.ledger.count
    assert world.ledger.only(name="broadcast").total == (world.size - 1) * sum(
        parameter.nbytes for parameter in model().parameters()
    )


@pytest.mark.parametrize("dtype, eps", [(torch.float32, 2**-23), (torch.bfloat16, 2**-7)])
def test_equal_up_to_rounding_in_lower_precision(dtype, eps):
    """A sum of four in another order is off by at most a few units in the last place of the largest gradient."""
    with World(4) as world:
        found = world.run(trained, steps=1, dtype=dtype)
    _, expected, _ = alone(steps=1, dtype=dtype)
    assert all(torch.equal(found[0][0], other[0]) for other in found)
    for name, gradient in expected.items():
        assert (found[0][1][name] - gradient).abs().max() <= 32 * eps * max(
            gradient.abs().max(), 1e-2
        ), name


def test_bytes_held_are_those_of_the_formula(four):
    def run(rank):
        net = GPT(CONFIG, generator=torch.Generator().manual_seed(0))
        replica, optimizer = (
            data_parallel.replicate(net, rank.comm("dp"), bucket_bytes=3000),
            torch.optim.AdamW(net.parameters()),
        )
        for _ in range(2):
            entropy(replica(mine(rank)[0]), mine(rank)[1]).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        buckets = {
            gradient.untyped_storage().data_ptr()
            for gradient in (parameter.grad for parameter in net.parameters())
        }
        return measure.model_states(net, optimizer), len(buckets), len(replica.buckets)

    expected = predict.states(
        CONFIG, TrainConfig(micro_batch=1, global_batch=4, precision="fp32")
    )
    for held, storages, buckets in four.run(run):
        assert expected.diff(held).unexplained == 0
        assert storages == buckets  # the gradients are views of the buckets: nothing is held twice


def test_replicas_hold_their_buckets_and_nothing_else(engine, four):
    """Every storage that is alive after a step, and was not before `replicate`: as many bytes as gradients, whether they are there or cleared."""

    def alive():
        return {
            x.untyped_storage()._cdata: x.untyped_storage().nbytes()
            for x in gc.get_objects()
            if type(x) in (torch.Tensor, nn.Parameter)
        }

    def run(rank):
        net, data = model(dtype=torch.float32), mine(rank)
        gc.collect()
        before = alive()
        replica = data_parallel.replicate(net, rank.comm("dp"), bucket_bytes=3000)
        sums = []
        for _ in range(2):
            entropy(replica(data[0]), data[1]).backward()
            sums.append(sum(nbytes for storage, nbytes in alive().items() if storage not in before))
            replica.zero_grad()
            sums.append(sum(nbytes for storage, nbytes in alive().items() if storage not in before))
        return sums

    gradients = 4 * sum(
        parameter.numel() for parameter in model().parameters() if parameter.requires_grad
    )
    world = four if engine == "processes" else World(1)  # threads see each other's tensors
    assert world.run(run) == [[gradients] * 4] * world.size


def test_accumulation_reduces_once_a_step(four):
    expected, *_ = alone()
    sent = {}
    for quiet in (True, False):
        found = four.run(trained, micro=3, quiet=quiet)
        assert all(torch.allclose(w, expected, rtol=0, atol=1e-10) for w, *_ in found)
        sent[quiet] = four.ledger.only(name="all_reduce").total
    assert (
        sent[False] == 3 * sent[True]
        and sent[True] == reduced(found[0][2], 4).scaled(3).total
    )


def test_no_sync_ends_with_its_block_whatever_happens():
    def run(rank):
        replica = data_parallel.replicate(nn.Linear(2, 1), rank.comm("dp"))
        with contextlib.suppress(KeyError), replica.no_sync():
            raise KeyError
        return replica.synchronize

    assert World(1).run(run) == [True]


def test_no_sync_inside_no_sync_ends_with_the_outer_one(four):
    """Gradients differ between ranks after the inner block, and after the outer one agree."""

    def run(rank):
        net, found = model(rank.rank), []
        replica = data_parallel.replicate(net, rank.comm("dp"))
        inputs, targets = mine(rank)

        def backward():
            net.zero_grad()
            entropy(replica(inputs), targets).backward()
            found.append(net.tokens.weight.grad.clone())

        with replica.no_sync():
            with replica.no_sync():
                backward()
            backward()
        backward()
        return found

    one, other, *_ = four.run(run)
    assert [torch.equal(a, b) for a, b in zip(one, other, strict=True)] == [False, False, True]


def test_uneven_batches_are_weighed_by_their_share(four):
    ten = tuple(side[:10] for side in ROWS)

    def run(rank):
        net = model(rank.rank)
        replica = data_parallel.replicate(net, rank.comm("dp"))
        inputs, targets = (side.tensor_split(rank.size)[rank.rank] for side in ten)
        with torch.device("meta"):  # what is sent lies where the rank's tensors do
            share = data_parallel.share(len(inputs), rank.comm("dp"))
        (entropy(replica(inputs), targets) * share).backward()
        return net.tokens.weight.grad.clone()

    net = model()
    entropy(net(ten[0]), ten[1]).backward()
    assert all(
        torch.allclose(found, net.tokens.weight.grad, rtol=0, atol=1e-12) for found in four.run(run)
    )


def test_a_gradient_that_does_not_come_is_named(four):
    def run(rank):
        model = nn.ModuleDict({name: nn.Linear(2, 1) for name in ("used", "never")})
        model.forward = model["used"].forward
        data_parallel.replicate(model, rank.comm("dp"))(torch.ones(1, 2)).sum().backward()

    with pytest.raises(RankError, match="no gradient came for never.bias, never.weight: freeze"):
        four.run(run)


def test_gradients_of_inputs_are_nobody_elses_business():
    """torch.autograd.grad goes backward without touching a parameter: nothing is reduced, and nothing is missed."""

    def run(rank):
        net, x = nn.Linear(2, 1), torch.ones(1, 2, requires_grad=True)
        replica = data_parallel.replicate(net, rank.comm("dp"))
        (slope,) = torch.autograd.grad(replica(x).sum(), x)
        replica(x).sum().backward()
        return torch.equal(slope, net.weight), net.weight.grad.tolist()

    with World(2) as two:
        assert two.run(run) == [(True, [[1.0, 1.0]])] * 2
        assert two.ledger.only(name="all_reduce").total == 2 * 12


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers(reentrant):
    """A reentrant checkpoint runs backward passes inside the backward pass, and the end of one of those is not the end."""

    def run(rank):
        net = model(rank.rank, frozen=False)
        for block in net.blocks:
            block.forward = functools.partial(
                torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=reentrant
            )
        replica = data_parallel.replicate(net, rank.comm("dp"), bucket_bytes=5000)
        entropy(replica(mine(rank)[0]), mine(rank)[1]).backward()
        return torch.cat([parameter.grad.flatten() for parameter in net.parameters()])

    net = model(frozen=False)
    entropy(net(ROWS[0]), ROWS[1]).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in net.parameters()])
    assert all(torch.allclose(found, expected, rtol=0, atol=1e-12) for found in World(2).run(run))


class Twice(nn.Module):
    """One layer, called `times` times, under a checkpoint each time."""

    def __init__(self, reentrant):
        super().__init__()
        self.layer, self.reentrant = nn.Linear(2, 2, bias=False), reentrant
        nn.init.constant_(self.layer.weight, 0.5)

    def forward(self, x, times=2):
        for _ in range(times):
            x = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return x


def twice(rank, reentrant):
    replica = data_parallel.replicate(Twice(reentrant), rank.comm("dp"))
    found = []
    for step in range(3):
        replica.zero_grad()
        with (
            replica.no_sync() if step == 1 else contextlib.nullcontext()
        ):  # the second adds up with the third
            replica(torch.full((1, 2), step + rank.rank + 1.0, requires_grad=True)).sum().backward()
        found.append(replica.module.layer.weight.grad.tolist())
    return found


def test_a_gradient_that_comes_twice_in_a_backward_pass():
    """Two reentrant checkpoints share a layer: its first gradient may be on its way when the second is added to it."""
    with World(2) as two:
        with pytest.raises(
            RankError,
            match="the gradient of layer.weight comes twice in one backward pass: .* use_reentrant=False",
        ):
            two.run(twice, True)
        right = two.run(twice, False)
        assert right[0][0] == right[1][0] == [[3.0, 3.0]] * 2 and right[0][1] != right[1][1]
        assert two.ledger.only(name="all_reduce").total == 2 * 2 * 16


def test_weights_that_lie_transposed_are_rank_0s_too(four):
    def program(rank):
        layer = nn.Linear(4, 6, dtype=torch.float64)
        layer.weight.data = torch.arange(24.0, dtype=torch.float64).view(4, 6).T + rank.rank
        replica = data_parallel.replicate(layer, rank.comm("dp"))
        replica(torch.ones(1, 4, dtype=torch.float64) * rank.rank).sum().backward()
        return layer.weight.detach().clone(), layer.weight.grad.clone()

    for weight, grad in four.run(program):
        assert torch.equal(weight, torch.arange(24.0, dtype=torch.float64).view(4, 6).T)
        assert torch.equal(grad, torch.full_like(grad, 1.5))


def test_buffers_are_rank_0s_at_the_start(four):
    def run(rank):
        net = nn.BatchNorm1d(4)
        net.running_mean.fill_(rank.rank)
        replica = data_parallel.replicate(net, rank.comm("dp"))
        return [buffer.clone() for buffer in replica.buffers()]

    for buffers in four.run(run):
        assert torch.equal(buffers[0], torch.zeros(4))
    predicted = started(nn.BatchNorm1d(4), 4)
    assert predicted.diff(four.ledger).unexplained == 0
    assert four.ledger.total == 3 * 4 * (4 * 4) + 3 * 8  # weight, bias, mean, variance; a counter


def scaled_steps(ranks, reduce, steps=9):
    """Scales, skipped steps, overflows and weights of fp16 training with a dynamic loss scale, where the last rank's loss overflows in steps 4 and 7.

    `ranks` are those whose micro-batches run here, `reduce(net, n)` says what makes their gradients a mean over all `n`.
    """
    ours, n = ranks
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(0))
    forward, mean = reduce(net, n)
    optimizer, scaler = (
        torch.optim.SGD(net.parameters(), lr=0.1),
        LossScaler(2.0**12, growth_interval=3),
    )
    scales, stepped, overflowed = [], [], []
    for step in range(steps):
        optimizer.zero_grad()
        for index in ours:
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(100 * step + index))
            with autocast(torch.float16):
                outputs = forward(x)
                outputs.register_hook(
                    lambda gradient: overflowed.append(not gradient.isfinite().all())
                )
                loss = outputs.float().square().mean() * (
                    1e9 if step in (4, 7) and index == n - 1 else 1
                )
            scaler.scale(loss).backward()
        mean()
        scales.append(scaler.value)
        stepped.append(scaler.step(optimizer))
        scaler.update()
    return scales, stepped, overflowed, weights(net)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_step_that_overflows_on_one_rank_is_skipped_on_all(size):
    """An inf of one rank is in the mean of all, so all scalers see it, and take the same turns as one device that runs the ranks' micro-batches."""

    def run(rank):
        def reduce(net, n):
            return data_parallel.replicate(net, rank.comm("dp")), lambda: None

        return scaled_steps(([rank.rank], rank.size), reduce)

    def one_device(net, n):
        return net, lambda: [parameter.grad.div_(n) for parameter in net.parameters()]

    with World(size) as world:
        ranks = world.run(run)
    scales, stepped, _, expected = scaled_steps((range(size), size), one_device)
    assert stepped == [True] * 4 + [False] + [True] * 2 + [False] + [True] and scales[3:6] == [
        2.0**13,
        2.0**13,
        2.0**12,
    ]
    for index, (theirs, skipped, overflowed, found) in enumerate(ranks):
        assert (theirs, skipped) == (scales, stepped)
        assert overflowed == [
            index == size - 1 and step in (4, 7) for step in range(9)
        ]  # on one rank only
        assert torch.allclose(found, expected, rtol=0, atol=1e-6) and torch.equal(
            found, ranks[0][3]
        )


def test_a_module_that_returns_a_leaf_is_left_as_it_is():
    """A hook on a parameter or an input of the user's would stay there, one more in each step."""

    class Weight(nn.Linear):
        def forward(self, x):
            return super().forward(x), self.weight, x

    def run(rank):
        replica, x = (
            data_parallel.replicate(Weight(2, 1), rank.comm("dp")),
            torch.ones(1, 2, requires_grad=True),
        )
        for _ in range(2):
            sum(part.sum() for part in replica(x)).backward()
        return (
            replica.module.weight._backward_hooks,
            x._backward_hooks,
            replica.module.weight.grad.tolist(),
        )

    assert World(2).run(run) == [(None, None, [[4.0, 4.0]])] * 2


def test_replicated_again_a_module_is_reduced_once():
    def run(rank):
        net = nn.Linear(4, 1, bias=False)
        first = data_parallel.replicate(net, rank.comm("dp"))
        second = data_parallel.replicate(net, rank.comm("dp"))
        second(torch.full((1, 4), rank.rank + 1.0)).sum().backward()
        return net.weight.grad.tolist(), first.timeline.spans

    with World(2) as two:
        assert two.run(run) == [([[1.5] * 4], ())] * 2
        assert two.ledger.only(name="all_reduce").total == 2 * 16


def test_a_module_that_changed_is_refused():
    def run(rank, change):
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        net[0].weight.requires_grad_(False)
        replica = data_parallel.replicate(net, rank.comm("dp"))
        net.get_parameter(change).requires_grad_(change == "0.weight")
        replica(torch.ones(1, 2))

    with pytest.raises(RankError, match=r"0.weight frozen or thawed since replicate\(…\)"):
        World(1).run(run, "0.weight")
    with pytest.raises(RankError, match=r"1.bias frozen or thawed"):
        World(1).run(run, "1.bias")


def test_modules_that_differ_are_named(four):
    def run(rank):
        net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1 + rank.rank // 3))
        data_parallel.replicate(net, rank.comm("dp"))

    with pytest.raises(
        MismatchError, match=r"'1.weight' is not alike on all ranks: build the same module"
    ) as error:
        four.run(run)
    assert "[1, 3]" in str(error.value) and "[2, 3]" in str(error.value)


def test_after_an_error_in_a_backward_pass_replicas_are_made_again():
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ZeroDivisionError

    def run(rank):
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        replica = data_parallel.replicate(net, rank.comm("dp"))
        replica.module = nn.Identity()
        with pytest.raises(ZeroDivisionError):
            replica(net[1](Bad.apply(net[0](torch.ones(1, 2))))).sum().backward()
        with pytest.raises(
            RuntimeError,
            match=r"ended with an error while gradients travelled: call replicate\(…\) again",
        ):
            replica(torch.ones(1, 2))
        net.zero_grad()
        again = data_parallel.replicate(net, rank.comm("dp"))
        again(torch.ones(1, 2)).sum().backward()
        return net[1].bias.grad.item()

    assert World(2).run(run) == [1.0, 1.0]


def test_a_rank_that_runs_out_of_data_is_a_deadlock():
    def run(rank):
        replica = data_parallel.replicate(nn.Linear(2, 1), rank.comm("dp"))
        for _ in range(2 + rank.rank):
            replica(torch.ones(1, 2)).sum().backward()

    with pytest.raises(DeadlockError):
        World(2).run(run)


def test_buckets_hold_one_dtype():
    def run(rank):
        net = nn.Sequential(
            nn.Linear(4, 4, dtype=torch.float64),
            nn.Linear(4, 4, bias=False),
            nn.Linear(4, 2, dtype=torch.float64),
        )
        replica = data_parallel.replicate(net, rank.comm("dp"))
        x = net[2](net[1](net[0](torch.ones(1, 4, dtype=torch.float64)).float()).double())
        x.sum().backward()
        return [bucket.names for bucket in replica.buckets], [
            parameter.grad.dtype for parameter in net.parameters()
        ]

    names, dtypes = World(2).run(run)[0]
    assert names == [("2.bias", "2.weight", "0.bias", "0.weight"), ("1.weight",)]
    assert dtypes == [torch.float64, torch.float64, torch.float32, torch.float64, torch.float64]


def test_a_bucket_leaves_while_others_are_computed(four):
    """Told by the books: in each of two steps, what layer 1 sends stands before the mark that the backward pass of layer 0 makes."""

    class Mark(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, comm):
            ctx.comm = comm
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            with ctx.comm.record("mark"):
                ctx.comm.barrier()
            return gradient, None

    def run(rank, how):
        net, comm = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), rank.comm("dp")
        replica = data_parallel.replicate(net, comm, bucket_bytes=80, **how)
        replica.module = nn.Identity()
        for _ in range(2):
            replica(net[1](Mark.apply(net[0](torch.ones(1, 4)), comm))).sum().backward()
        return replica.timeline

    for overlap, how in ((True, {}), (False, {"overlap": False})):
        timelines = four.run(run, how)
        ops = [
            op
            for op, _ in itertools.groupby(event.op for event in four.trace.ranks[0])
            if op != "broadcast"
        ]
        assert ops == ["all_reduce", "mark", "all_reduce", "mark", "all_reduce"][not overlap :]
        for rank, timeline in enumerate(timelines):
            assert [span.name for span in timeline.spans] == [
                "forward",
                "1",
                "0",
                "bucket 0",
                "bucket 1",
            ]
            assert all(s.rank == rank and 0 <= s.start <= s.end for s in timeline.spans)


def test_a_replica_that_nobody_holds_is_freed_and_says_so():
    def run(rank):
        net = nn.Linear(2, 1)
        gone = weakref.ref(data_parallel.replicate(net, rank.comm("dp")))
        with pytest.raises(RuntimeError, match="keep what replicate"):
            net(torch.ones(1, 2)).sum().backward()
        return gone() is None

    gc.disable()
    try:
        assert World(1).run(run) == [True]
    finally:
        gc.enable()


# ── what came before ───────────────────────────────────────────────────────────────────────────────────────────────


def test_gradients_averaged_one_by_one(four):
    def run(rank):
        net, (inputs, targets) = model(), mine(rank)
        entropy(net(inputs), targets).backward()
        data_parallel.average_gradients(net, rank.comm("dp"))
        return {
            name: parameter.grad
            for name, parameter in net.named_parameters()
            if parameter.grad is not None
        }

    _, expected, _ = alone(steps=1)
    for found in four.run(run):
        assert found.keys() == expected.keys() and all(
            torch.allclose(found[name], expected[name], rtol=0, atol=1e-12) for name in found
        )
    sizes = {name: gradient.nbytes for name, gradient in expected.items()}
    grouped = data_parallel.buckets(sizes, 1, itemsize=8)
    assert reduced(grouped, 4).diff(four.ledger).unexplained == 0


# ── data, buckets, time ────────────────────────────────────────────────────────────────────────────────────────────


@given(st.integers(0, 50), st.integers(1, 9), st.integers(0, 3))
def test_everything_is_dealt_out_in_equal_shares(length, size, epoch):
    parts = [data_parallel.sampler(length, rank, size, epoch=epoch) for rank in range(size)]
    assert {len(part) for part in parts} == {-(-length // size)}
    dealt = [i for part in parts for i in part]
    assert set(dealt) == set(range(length)) and len(dealt) - length == -length % size * bool(length)


def test_epochs_and_seeds_shuffle_anew():
    deals = [
        data_parallel.sampler(100, 0, 1, epoch=epoch, seed=seed)
        for epoch, seed in ((0, 0), (0, 0), (1, 0), (0, 2))
    ]
    assert deals[0] == deals[1] and deals[0] != deals[2] != deals[3] != deals[0]


@given(st.integers(1, 50), st.integers(1, 9), st.integers(0, 3), st.integers(0, 3))
def test_the_sampler_deals_like_torch(length, size, epoch, seed):
    for rank in range(size):
        theirs = DistributedSampler(range(length), size, rank, seed=seed)
        theirs.set_epoch(epoch)
        ours = data_parallel.sampler(length, rank, size, epoch=epoch, seed=seed)
        assert ours == list(theirs)
        plain = DistributedSampler(range(length), size, rank)
        assert data_parallel.sampler(length, rank, size) == list(plain)


@given(st.lists(st.integers(1, 50), max_size=12), st.integers(1, 80))
def test_buckets_part_the_parameters_in_reverse(sizes, bucket_bytes):
    named = {str(i): size for i, size in enumerate(sizes)}
    grouped = data_parallel.buckets(named, bucket_bytes)
    assert [name for bucket in grouped for name in bucket.names] == list(reversed(named))
    assert all(bucket.nbytes <= bucket_bytes or len(bucket.names) == 1 for bucket in grouped)
    assert all(
        bucket.nbytes + after.sizes[0] > bucket_bytes
        for bucket, after in itertools.pairwise(grouped)
    )  # none could have taken one more


def test_the_simulation_follows_the_formula():
    link = Link(1e-3, 1e6)
    cost = collectives.cost("all_reduce_ring", 4000, 4, link)
    layers = [(4000, 0.1)] * 3
    overlapped = data_parallel.backward_timeline(layers, bucket_bytes=4000, n=4, link=link)
    assert overlapped.makespan == pytest.approx(0.3 + cost) and overlapped.hidden == pytest.approx(
        2 / 3
    )
    late = data_parallel.backward_timeline(layers, bucket_bytes=4000, n=4, link=link, overlap=False)
    assert late.exposed == pytest.approx(3 * cost) and late.hidden == 0
    slow = data_parallel.backward_timeline(
        layers, bucket_bytes=4000, n=4, link=Link(1.0, 1e6)
    )  # the network never catches up
    assert slow.makespan == pytest.approx(
        0.1 + 3 * collectives.cost("all_reduce_ring", 4000, 4, Link(1.0, 1e6))
    )


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=8),
    st.integers(1, 200),
    st.floats(0.0, 0.01) | st.floats(0.01, 2.0),  # up to 1/100 the network always keeps up
)
def test_what_can_be_hidden_is_all_but_the_last_bucket(sizes, bucket_bytes, slowness):
    """On a link without latency a bucket takes as long as its bytes, and so does the computation, unless the network is the slower one."""
    layers = [(4 * size, 1e-3 * size) for size in sizes]
    grouped = data_parallel.buckets(
        {f"layer {i}": nbytes for i, (nbytes, _) in enumerate(layers)}, 4 * bucket_bytes
    )
    found = data_parallel.backward_timeline(
        layers, bucket_bytes=4 * bucket_bytes, n=2, link=Link(0, 4e3 / max(slowness, 1e-3))
    ).hidden
    hideable = 1 - grouped[-1].nbytes / sum(bucket.nbytes for bucket in grouped)
    assert found <= hideable + 1e-9
    in_time = all(
        before.nbytes * slowness <= after.nbytes for before, after in itertools.pairwise(grouped)
    )
    assert not in_time or found == pytest.approx(hideable, abs=1e-9)


def test_a_chain_that_waits_is_reduced_as_the_simulation_says():
    """Its layers are those of `backward_timeline`: the same buckets, as many seconds of computation, the same bytes."""
    layers, options = [(4000, 0.01)] * 3, dict(bucket_bytes=4000)
    simulated = data_parallel.backward_timeline(layers, **options, n=2, link=Link(0, 1e9))

    def run(rank):
        chain, comm = rigs.data_parallel.waiting_chain(layers), rank.comm("dp")
        replica = data_parallel.replicate(chain, comm, **options)
        comm.barrier()
        replica(torch.ones(1)).backward()
        assert all((layer.weight.grad == 1).all() for layer in chain)
        return replica.timeline

    with World(2) as two:
        for timeline in two.run(run):
            backward = [span for span in timeline.spans if span.kind == "backward"]
            assert len(backward) == 3 and all(s.end - s.start >= 0.01 for s in backward)
            assert timeline.computed >= simulated.computed
            names = [span.name for span in timeline.spans if span.kind == "reduce"]
            assert names == [span.name for span in simulated.spans if span.kind == "reduce"]
        grouped = data_parallel.buckets([nbytes for nbytes, _ in layers], **options)
        books = two.ledger.only(name="all_reduce")
        assert reduced(grouped, 2).diff(books).unexplained == 0


# ── formula = dry run = real run ───────────────────────────────────────────────────────────────────────────────────


def counted(rank):
    """States after a step, the peak of the next one, and the buckets."""
    net = GPT(CONFIG)
    replica = data_parallel.replicate(net, rank.comm("dp"), bucket_bytes=3000)
    optimizer = torch.optim.AdamW(net.parameters())
    tokens = torch.zeros(2, 8, dtype=torch.long)

    def step():
        optimizer.zero_grad()
        entropy(replica(tokens), tokens).backward()
        optimizer.step()

    step()
    states = measure.model_states(net, optimizer)
    return states, measure.peak(step, net, optimizer).total, replica.buckets


def test_formula_dry_run_and_real_run_agree(four):
    real = four.run(counted)
    sent = four.ledger
    grouped = real[0][2]
    formula = reduced(grouped, 4).scaled(2) + started(GPT(CONFIG), 4)
    assert formula.diff(sent).unexplained == 0
    train = TrainConfig(micro_batch=2, global_batch=8, precision="fp32")
    states = predict.states(CONFIG, train)
    for i in (0, 3):
        dry = World(4, engine="dry")
        held, peak, found = dry.run(counted, rank=i)
        assert dry.ledger.diff(sent.only(rank=i)).unexplained == 0
        assert states.diff(held).unexplained == states.diff(real[i][0]).unexplained == 0
        assert (peak, found) == (real[i][1], grouped)


def test_what_makes_no_sense_is_named():
    with pytest.raises(ValueError, match="there is no rank 4 of 4: use 0 … 3"):
        data_parallel.sampler(10, 4, 4)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with World(1) as one, pytest.raises(RankError, match="no parameter of this module is trained"):
        one.run(lambda rank: data_parallel.replicate(frozen, rank.comm()))
