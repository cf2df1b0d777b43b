"""Snapshots: written by any number of ranks at any level, read by any other, refused where they do not fit."""

import dataclasses
import functools
import json
import os
import random
import struct
import tracemalloc
import zlib

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from zero_training import (
    GROUPS,
    OPTIMIZERS,
    TIED,
    UNTIED,
    advance,
    batches,
    build,
    grouped,
    inner,
    own,
    ranks,
    same,
    weights,
)

from labutils import world, zero
from labutils.zero import snapshot as snapshots


def lr(i):
    """The learning rate of group i, as a schedule would have left it."""
    return 3e-3 * (i + 1)


def write(rank, level, path, *, frozen=(), optimizer="adamw", groups=None):
    model = build(TIED, rank.rank, frozen=frozen)
    owner = own(model, rank.comm("dp"), level, OPTIMIZERS[optimizer], GROUPS.get(groups))
    advance(model, owner, rank, batches(TIED, 4)[:2])
    for i, group in enumerate(owner.param_groups):
        group["lr"] = lr(i)
    zero.save(path, model, owner)
    assert path.exists()  # for every rank, not for rank 0 alone
    return weights(model, owner)


def read(rank, level, path, *, frozen=(), optimizer="adamw", groups=None, **options):
    model = build(TIED, 10 + rank.rank, frozen=frozen)
    owner = own(model, rank.comm("dp"), level, OPTIMIZERS[optimizer], GROUPS.get(groups), **options)
    zero.load(path, model, owner)
    loaded = weights(model, owner)
    for group in owner.param_groups:  # without momentum there is nothing to keep
        assert all(
            bool(inner(owner).state[piece]) is (group.get("momentum", 1) > 0)
            for piece in group["params"]
            if len(piece) and piece.requires_grad
        )
    advance(model, owner, rank, batches(TIED, 4)[2:])
    return loaded, weights(model, owner), [group["lr"] for group in owner.param_groups]


@functools.cache
def uninterrupted(frozen=(), optimizer="adamw", groups=None):
    model = build(TIED, 0, frozen=frozen)
    alone = OPTIMIZERS[optimizer](grouped(model.named_parameters(), GROUPS.get(groups)))
    for step, (x,) in enumerate(batches(TIED, 4)):
        if step == 2:
            for i, group in enumerate(alone.param_groups):
                group["lr"] = lr(i)
        model.loss(x, x).backward()
        alone.step()
        alone.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "before, after, settings",
    [
        ((4, 1), (2, 1), {}),
        ((4, 2), (1, 3), {}),
        ((4, 3), (2, 3), dict(groups="adamw")),
        ((4, 3), (1, 1), dict(optimizer="momentum", groups="partly momentum")),
        ((1, 1), (4, 3), dict(groups="adamw")),
        ((3, 2), (4, 2), dict(groups="adamw")),
        ((2, 3), (3, 2), dict(optimizer="momentum", groups="partly momentum")),
        ((2, 1), (3, 1), dict(optimizer="momentum", groups="momentum")),
    ],
    ids=str,
)
def test_a_run_goes_on_with_another_number_of_ranks(before, after, settings, tmp_path):
    path, settings = (
        tmp_path / "run",
        settings | {"frozen": ("positions", "blocks.1.feed_forward.up")},
    )
    (n, level), (m, other) = before, after
    written = ranks(n).run(write, level, path, **settings)
    for loaded, final, rates in ranks(m).run(
        read, other, path, **settings, **({} if other == 3 else {"bucket_bytes": 3000})
    ):
        assert all(torch.equal(loaded[name], written[0][name]) for name in loaded)
        assert same(final, uninterrupted(**settings)) and rates == [
            lr(i) for i in range(len(rates))
        ]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_processes_write_and_threads_go_on(tmp_path):
    with world.World(2, engine="processes") as two:
        written = two.run(write, 3, tmp_path / "run")
    for loaded, final, _ in ranks(3).run(read, 2, tmp_path / "run"):
        assert all(torch.equal(loaded[name], written[0][name]) for name in loaded) and same(
            final, uninterrupted()
        )


def test_master_weights_survive(tmp_path):
    """What a snapshot keeps of half weights is their fp32 copy, so that nothing is rounded on the way."""

    def program(rank, path=None):
        model = nn.Linear(5, 1, bias=False).bfloat16()
        nn.init.constant_(model.weight, 1.0 / rank.size)
        optimizer = zero.Optimizer(
            model.parameters(),
            rank.comm("dp"),
            lambda params: torch.optim.SGD(params, lr=1e-4, momentum=0.5),
            level=1,
        )
        if rank.size == 1:
            zero.load(path, model, optimizer)
            assert model.weight.tolist() == [[0.25] * 5]  # 0.2499 as bfloat16
        model(torch.ones(1, 5).bfloat16()).sum().backward()
        optimizer.step()
        zero.save(path, model, optimizer)
        return optimizer.flats[0].shard.tolist()

    first, *_ = ranks(4).run(program, tmp_path / "run")
    (again,) = ranks(1).run(program, tmp_path / "run")
    assert first == pytest.approx([0.25 - 1e-4] * 2, abs=2**-24) and again == pytest.approx(
        [0.25 - 2.5e-4] * 5, abs=2**-24
    )


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory):
    path = tmp_path_factory.mktemp("snapshots") / "run"
    ranks(2).run(write, 2, path, groups="adamw")
    return path.read_bytes()


def refusal(data, tmp_path, config=TIED, **options):
    """What is said about a file, which must leave everything as it was."""
    (tmp_path / "run").write_bytes(data)

    def program(rank):
        model = build(config, 0, options.get("dtype", torch.float64))
        owner = own(
            model,
            rank.comm("dp"),
            3,
            options.get("make", OPTIMIZERS["adamw"]),
            options.get("groups", GROUPS["adamw"]),
        )
        before = weights(model, owner)
        with pytest.raises(zero.SnapshotError) as error:
            zero.load(tmp_path / "run", model, owner)
        assert (
            all(torch.equal(weight, before[name]) for name, weight in weights(model, owner).items())
            and not inner(owner).state
        )
        return str(error.value)

    told = set(ranks(2).run(program))
    assert len(told) == 1
    return told.pop()


@pytest.mark.parametrize("kept", [0, 5, 25, 400, 0.3, 0.99, -1])
def test_a_torn_file_is_refused(kept, snapshot, tmp_path):
    short = snapshot[: int(kept * len(snapshot)) if isinstance(kept, float) else kept]
    assert "run is torn, or no snapshot: " in refusal(short, tmp_path)


def test_a_file_of_something_else_is_refused(snapshot, tmp_path):
    torch.save({"model": torch.zeros(3)}, tmp_path / "other")
    assert "torn, or no snapshot" in refusal((tmp_path / "other").read_bytes(), tmp_path)
    save_file({"model": torch.zeros(3)}, tmp_path / "other")
    other = refusal((tmp_path / "other").read_bytes(), tmp_path)
    assert other.startswith("run is a safetensors file, but no snapshot of labutils.zero: ")
    assert "it has blocks.0.attention.key.bias besides" in refusal(snapshot, tmp_path, UNTIED)
    wider = dataclasses.replace(TIED, d_ff=28)
    told = refusal(snapshot, tmp_path, wider)
    assert "blocks.0.feed_forward.down.weight has shape [16, 24] there and [16, 28] here" in told
    deeper = dataclasses.replace(TIED, num_layers=4)
    assert "it lacks blocks.3.attention.key.bias" in refusal(snapshot, tmp_path, deeper)
    assert "was written by AdamW, this optimizer is SGD" in refusal(
        snapshot, tmp_path, make=OPTIMIZERS["sgd"], groups=None
    )
    assert "has groups of [20, 32] parameters, this optimizer of [52]" in refusal(
        snapshot, tmp_path, groups=None
    )
    assert "would lose digits" in refusal(snapshot, tmp_path, dtype=torch.float32)
    with pytest.raises(world.RankError, match="FileNotFoundError"):
        ranks(2).run(read, 1, tmp_path / "none")


def test_parameters_in_other_groups_are_refused(tmp_path):
    """The settings of a group come from the file: in another order they would be another's."""

    def program(rank, order, call):
        model = nn.Linear(2, 2)
        groups = [{"weight_decay": 0.1}, {"weight_decay": 0.0}][::order]
        optimizer = own(model, rank.comm("dp"), 3, torch.optim.AdamW, groups)
        optimizer.param_groups[:] = optimizer.param_groups[::order]
        call(tmp_path / "run", model, optimizer)

    ranks(2).run(program, 1, zero.save)
    with pytest.raises(world.RankError, match="or others: group them alike"):
        ranks(2).run(program, -1, zero.load)


def test_a_write_that_fails_leaves_the_older_file(tmp_path, monkeypatch):
    (tmp_path / "run").write_bytes(b"older")

    def program(rank):
        model = nn.Linear(4, 2)
        optimizer = own(model, rank.comm("dp"), 1, torch.optim.AdamW)
        zero.save(tmp_path / "run", model, optimizer)

    monkeypatch.setattr(os, "fsync", lambda _: 1 / 0)
    with pytest.raises(world.RankError, match="ZeroDivisionError"):
        ranks(2).run(program)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("run", b"older")]


def test_states_that_cannot_be_divided_are_refused(tmp_path):
    def program(rank):
        model = nn.Linear(4, 2)
        optimizer = own(model, rank.comm("dp"), 1, torch.optim.AdamW)
        optimizer.inner.state[optimizer.pieces[model.weight]] = {"what": torch.ones(2, 2)}
        zero.save(tmp_path / "run", model, optimizer)

    with pytest.raises(world.RankError, match="neither a number nor like a weight"):
        ranks(1).run(program)
    assert not list(tmp_path.iterdir())


def test_a_snapshot_is_a_file_of_weights_with_the_mode_of_other_files(tmp_path):
    written = ranks(2).run(write, 3, tmp_path / "run")[0]
    stored = load_file(tmp_path / "run")
    assert all(torch.equal(stored[name], weight) for name, weight in written.items())
    assert stored["exp_avg/tokens.weight"].shape == written["tokens.weight"].shape
    (tmp_path / "other").touch()
    assert (tmp_path / "run").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_what_a_killed_run_has_left_goes(tmp_path):
    for name in (".run.0", ".run.txt"):
        (tmp_path / name).write_bytes(b"left")
    os.symlink(tmp_path / "run", tmp_path / "latest")
    ranks(2).run(write, 3, tmp_path / "latest")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "latest", ".run.txt"}
    assert (tmp_path / "latest").is_symlink() and load_file(tmp_path / "run")


def changed(snapshot, change):
    """The file with another description of itself."""
    (size,) = struct.unpack("<Q", snapshot[:8])
    header = json.loads(snapshot[8 : 8 + size])
    own = json.loads(header["__metadata__"]["labutils.zero"])
    own = change(own) or own
    header["__metadata__"]["labutils.zero"] = own if isinstance(own, str) else json.dumps(own)
    text = json.dumps(header).encode()
    return summed(struct.pack("<Q", len(text)) + text + snapshot[8 + size :])


def summed(data):
    """The file with the check sum that it should have, which is taken over eight zeros."""
    place = data.index(b'"crc32": "') + len(b'"crc32": "')
    blank = data[:place] + b"00000000" + data[place + 8 :]
    return data[:place] + format(zlib.crc32(blank), "08x").encode() + data[place + 8 :]


@pytest.mark.parametrize(
    "change, told",
    [
        (lambda own: "[" * 100_000, "cannot be read"),
        (lambda own: "[]", "cannot be read"),
        (lambda own: own.pop("states") and None, "cannot be read"),
        (lambda own: own["groups"][0].update(names=7), "cannot be read"),
        (lambda own: own["groups"][0].update(lr={}), "sets lr of a group to {}"),
        (lambda own: own["groups"][0].update(params=[1.0]), "sets params of a group"),
        (lambda own: own["groups"][0].update(lr="x"), "sets lr of a group to 'x'"),
        (lambda own: own["states"]["tokens.weight"].update(step="x"), "lacks step/tokens.weight"),
        (lambda own: own["states"]["tokens.weight"].update(step=[]), "cannot be read"),
        (lambda own: own["states"].update(other={"exp_avg": "F32"}), "lacks exp_avg/other"),
    ],
)
def test_a_description_that_cannot_be_is_refused_before_anything_changes(
    change, told, snapshot, tmp_path
):
    assert told in refusal(changed(snapshot, change), tmp_path)


def test_a_state_of_another_shape_is_refused_before_anything_changes(tmp_path):
    ranks(1).run(write, 2, tmp_path / "run", groups="adamw")
    with safe_open(tmp_path / "run", "pt") as file:
        own, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}
    tensors["exp_avg/tokens.weight"] = tensors["exp_avg/tokens.weight"][:-1].clone()
    save_file(tensors, tmp_path / "run", {"own": own["labutils.zero"]})
    data = (tmp_path / "run").read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header = {"__metadata__": {"crc32": "00000000", **own}} | {
        name: place for name, place in header.items() if name != "__metadata__"
    }
    text = json.dumps(header).encode()
    told = refusal(summed(struct.pack("<Q", len(text)) + text + data[8 + size :]), tmp_path)
    assert "exp_avg/tokens.weight that is not like the weight" in told


def told(files, path, config=TIED):
    """What `load` says to one rank of each of these files; "" for the last if it takes it."""

    def program(rank):
        model = build(config, 1)
        owner = own(model, rank.comm("dp"), 3, OPTIMIZERS["adamw"], GROUPS["adamw"])
        before, said = weights(model, owner), []
        for data in files:
            path.write_bytes(data)
            try:
                zero.load(path, model, owner)
                said.append("")
            except zero.SnapshotError as error:
                said.append(str(error))
                now = weights(model, owner)
                assert all(torch.equal(now[name], before[name]) for name in now)
        return said

    return ranks(1).run(program)[0]


def test_a_flipped_bit_is_refused_wherever_it_is(snapshot, tmp_path):
    """At random places of the header and of the data, and at each of the first bytes."""
    (size,) = struct.unpack("<Q", snapshot[:8])
    draw, files = random.Random(0), []
    places = [*range(64), *(draw.randrange(8, 8 + size) for _ in range(30))]
    places += [draw.randrange(8 + size, len(snapshot)) for _ in range(50)]
    for place in places:
        flipped = bytearray(snapshot)
        flipped[place] ^= 1 << draw.randrange(8)
        files.append(bytes(flipped))
    *said, right = told([*files, summed(snapshot)], tmp_path / "run")
    assert right == "" and summed(snapshot) == snapshot
    for place, text in zip(places, said, strict=True):
        assert "use an older one, or copy it again" in text or "give one that zero.save" in text
        assert place < 8 + size or "is damaged: the sum of its bytes is " in text


@pytest.mark.parametrize(
    "field, value",
    [
        ("num_heads", 4), ("num_kv_heads", 1), ("norm", "rmsnorm"), ("ffn", "swiglu"),
        ("bias", "qkv"), ("positions", "rope"), ("top_k", 2), ("name", "mine"), ("dropout", 0.5),
    ],
)  # fmt: skip
def test_a_file_of_another_config_is_refused_by_the_name_of_the_field(
    field, value, snapshot, tmp_path
):
    """By hand in the file, so that shapes and names of the weights say nothing."""

    def change(own):
        assert own["config"].get(field) != value
        if field in own["config"]:
            own["config"][field] = value

    (said,) = told([changed(snapshot, change)], tmp_path / "run")
    if field in ("name", "dropout"):
        assert said == ""  # no weight means anything else by it
    else:
        mine = getattr(TIED, field)
        assert f"is of another model: {field} is {value!r} there and {mine!r} here; build" in said


def test_as_many_heads_of_another_width_are_another_model(snapshot, tmp_path):
    """The very case: all shapes are the same."""
    heads = dataclasses.replace(TIED, num_heads=4, num_kv_heads=4, d_head=4)
    (said,) = told([snapshot], tmp_path / "run", heads)
    assert "is of another model: num_heads is 2 there and 4 here, num_kv_heads is 2 " in said


def test_a_file_without_a_sum_is_refused(snapshot, tmp_path):
    (size,) = struct.unpack("<Q", snapshot[:8])
    text = snapshot[8 : 8 + size].replace(b'"crc32": "' + snapshot[36:44] + b'", ', b"")
    older = struct.pack("<Q", len(text)) + text + snapshot[8 + size :]
    assert len(older) == len(snapshot) - 21
    (said,) = told([older], tmp_path / "run")
    assert "has no check sum" in said and "load it with what wrote it" in said


def test_a_file_is_summed_up_by_little(tmp_path):
    """Not in one piece beside the tensors: memory must not double."""
    (tmp_path / "run").write_bytes(b"x" * (1 << 24))
    tracemalloc.start()
    try:
        assert "has no check sum" in snapshots._damage(tmp_path / "run")
        head = b" " * 8 + b'{"__metadata__": {"crc32": "'
        (tmp_path / "run").write_bytes(head + b"x" * (1 << 24))
        tracemalloc.reset_peak()
        assert "is damaged" in snapshots._damage(tmp_path / "run")
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
    finally:
        tracemalloc.stop()


def test_a_parameter_of_one_number_comes_back(tmp_path):
    def program(rank, number, deed):
        module = nn.ParameterDict({"scale": torch.tensor(number), "rows": torch.ones(3)})
        owner = zero.Optimizer(
            module.named_parameters(), rank.comm("dp"), lambda named: torch.optim.SGD([p for _, p in named]), level=1
        )
        deed(tmp_path / "one", module, owner)
        return module["scale"].item()

    with world.World(2) as two:
        assert two.run(program, 0.5, zero.save) == [0.5, 0.5]
        assert two.run(program, 7.0, zero.load) == [0.5, 0.5]
