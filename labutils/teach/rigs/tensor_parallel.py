"""The three results that a tensor-parallel step owes, each against its formula: equal to the plain
model, bytes sent, bytes kept; and what one rank keeps at full size."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from labutils import collectives, measure, predict, tensor_parallel, units
from labutils.config import Mesh, ModelConfig, TrainConfig
from labutils.ledger import Ledger, Line
from labutils.model import GPT
from labutils.world import Rank, World

_STEPS, _BATCH = 3, 2


@dataclass(frozen=True)
class Compared:
    """What three steps left: a row of a table, under `HEAD`.

    sent, kept: bytes of rank 0, in one step in float64, and for the backward pass of one in fp32
    sent_unexplained: bytes between all that the ranks sent and `predict.sent`, after the start
    kept_unexplained: bytes between all that the ranks kept and `predict.activations`
    """

    ranks: int
    sequence: bool
    equal: bool
    sent: int
    sent_unexplained: int
    kept: int
    kept_unexplained: int

    HEAD = "ranks  sequence  equal      sent  unexplained      kept  unexplained"

    def __str__(self) -> str:
        row = f"{self.ranks:5} {self.sequence!s:>9} {self.equal!s:>6}"
        row += f" {units.text(self.sent):>9} {self.sent_unexplained:12}"
        return row + f" {units.text(self.kept):>9} {self.kept_unexplained:12}"


def _train(module: GPT) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of three steps of AdamW; the last gradients, and the weights after them."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses: list[float] = []
    draw, config = torch.Generator().manual_seed(7), module.config
    for _ in range(_STEPS):
        shape = (2, _BATCH, config.seq_len)
        optimizer.zero_grad()
        loss = module.loss(*torch.randint(config.vocab_size, shape, generator=draw))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        found[f"{name}, gradient"], found[name] = parameter.grad, parameter.detach()
    return losses, found


def _split(rank: Rank, config: ModelConfig, sequence: bool) -> tuple[list[float], dict]:
    model = GPT(config, generator=rank.generator).double()
    return _train(tensor_parallel.parallelize(model, rank.comm("tp"), sequence))


def cut_as_weights(rank: Rank, config: ModelConfig, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that have the names and shapes of the model's parameters, such as their gradients,
    cut for this rank as the parameters are."""
    model = GPT(config).double()
    for name, parameter in model.named_parameters():
        parameter.data.copy_(whole[name])
    cut = tensor_parallel.parallelize(model, rank.comm("tp")).named_parameters()
    return {name: parameter.detach() for name, parameter in cut}


def _shares(rank: Rank, config: ModelConfig, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's shares of weights and of gradients."""
    found: dict[str, Tensor] = {}
    for which in ("", ", gradient"):
        part = {name.removesuffix(which): x for name, x in whole.items() if name.endswith(which)}
        found |= {name + which: x for name, x in cut_as_weights(rank, config, part).items()}
    return found


def _keep(
    rank: Rank,
    config: ModelConfig,
    micro_batch: int,
    sequence: bool,
    dtype: torch.dtype = torch.float32,
) -> Ledger:
    model = tensor_parallel.parallelize(GPT(config).to(dtype), rank.comm("tp"), sequence)
    tokens, targets = torch.zeros(2, micro_batch, config.seq_len, dtype=torch.long).unbind()
    return measure.saved_activations(lambda: model.loss(tokens.clone(), targets.clone()), model)


def compared(world: World, config: ModelConfig, sequence: bool = False) -> Compared:
    """Trains a model of that shape on all ranks of a world and on one alone, in float64, and
    compares losses, gradients and weights up to 1e-10. Each rank draws other weights; those of
    rank 0 count.

    >>> sizes = dict(num_layers=1, d_model=8, num_heads=2, d_ff=8, vocab_size=6, seq_len=4)
    >>> compared(World(Mesh(tp=2)), ModelConfig(**sizes)).equal
    True
    """
    losses, whole = _train(GPT(config, generator=torch.Generator().manual_seed(0)).double())
    runs, n = world.run(_split, config, sequence), world.size
    books = world.ledger
    fp64 = TrainConfig(micro_batch=_BATCH, global_batch=_BATCH, precision="fp64", sequence=sequence)
    pairs = list(zip(runs, world.run(_shares, config, whole), strict=True))
    equal = all(
        torch.allclose(torch.tensor(its_losses), torch.tensor(losses), rtol=0, atol=1e-10)
        and all(torch.allclose(found[at], share[at], rtol=0, atol=1e-10) for at in share)
        for (its_losses, found), share in pairs
    )
    step = [predict.sent(config, fp64, world.mesh, rank) for rank in range(n)]
    whole_bytes = 8 * config.num_params
    start = collectives.sent("broadcast_tree", nbytes=whole_bytes, n=n, axis="tp", name="broadcast")
    predicted = [line for each in step for line in each.scaled(_STEPS)]
    predicted += start
    kept = world.run(_keep, config, _BATCH, sequence)
    expected = _kept(config, replace(fp64, precision="fp32"), n)
    return Compared(
        ranks=n,
        sequence=sequence,
        equal=equal,
        sent=step[0].total,
        sent_unexplained=Ledger(predicted).diff(books).unexplained,
        kept=kept[0].total,
        kept_unexplained=sum(expected.diff(each).unexplained for each in kept),
    )


def _kept(config: ModelConfig, train: TrainConfig, n: int) -> Ledger:
    """What a rank keeps by formula, and the targets; of these a step has their number beside."""
    targets = Line("outside", 8 * (train.micro_batch * config.seq_len - 1), "activations")
    return predict.activations(config, train, Mesh(tp=n)) + Ledger([targets])


def at_full_size(
    config: ModelConfig, n: int, rank: int, *, micro_batch: int
) -> tuple[Ledger, int, float]:
    """What a rank keeps of a forward pass in bf16 under sequence parallelism, by a dry run; the
    bytes of it that `predict.activations` leaves unexplained; and the bytes of each layer as
    Korthikanti et al. count: a mask in one byte, where PyTorch's CPU has two, and no statistics of
    norms.

    Cost: about 0.1 s for each layer, whatever its size.
    """
    with World(Mesh(tp=n), engine="dry") as alone:
        dry = alone.run(_keep, config, micro_batch, True, torch.bfloat16, rank=rank)
    bf16 = TrainConfig(micro_batch=micro_batch, global_batch=micro_batch, sequence=True)
    formula = _kept(config, bf16, n)
    counted = 0.0
    for line in formula:
        name = getattr(line.note, "name", "")
        if line.name.startswith("blocks.") and name != "statistics":
            counted += line.amount / (2 if name == "mask" else 1)
    return dry, formula.diff(dry).unexplained, counted / config.num_layers
