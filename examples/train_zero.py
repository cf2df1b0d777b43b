r"""Train a small GPT at every level of ZeRO: the same losses on one rank and on many.

    python examples/train_zero.py                       four ranks, threads of this process
    python examples/train_zero.py --engine processes    four processes of this machine
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d \
        --rdzv-endpoint node0:29400 examples/train_zero.py --level 3

The last line is typed on both nodes; node0 is the name of one of them.
"""

import argparse
import os

import torch

from labutils import measure, units, zero
from labutils.config import ModelConfig
from labutils.model import GPT
from labutils.world import World

MODEL = ModelConfig(num_layers=4, d_model=64, num_heads=4, d_ff=256, vocab_size=128, seq_len=32)
BATCH = 48  # sequences a step: any number of ranks that divides it gives the same losses


def batch(step, index, size):
    """This rank's sequences of a step and what follows each token: all count, in some stride."""
    draw = torch.Generator().manual_seed(step)
    start, stride = (
        torch.randint(MODEL.vocab_size, (BATCH, 1), generator=draw),
        torch.randint(1, 4, (BATCH, 1), generator=draw),
    )
    text = (start + stride * torch.arange(MODEL.seq_len + 1)) % MODEL.vocab_size
    mine = text.chunk(size)[index]
    return mine[:, :-1], mine[:, 1:]


def adamw(named):
    """Matrices decay, the weights of norms and biases do not."""
    groups = [{"params": [], "weight_decay": 0.1}, {"params": [], "weight_decay": 0.0}]
    for name, weights in named:
        groups["norm" in name or name.endswith("bias")]["params"].append(weights)
    return torch.optim.AdamW(groups, lr=3e-3)


def train(rank, level, steps, load, save):
    """The mean loss of every step, and the bytes of model states at the peak of the last one."""
    comm = rank.comm("dp")
    model = GPT(MODEL, generator=torch.Generator().manual_seed(rank.rank)).to(
        rank.device
    )  # all go on with rank 0's weights

    if level == 3:
        zero.shard(model, comm)
        optimizer = adamw(model.named_parameters())
        inner, shards = optimizer, lambda: list(model.parameters())
    else:
        optimizer = zero.Optimizer(
            model.named_parameters(), comm, adamw, level=level, bucket_bytes=2**18
        )
        inner, shards = optimizer.inner, optimizer.collect
    if load:
        zero.load(load, model, optimizer)
    losses = []

    def one(step):
        tokens, targets = (part.to(rank.device) for part in batch(step, comm.rank, comm.size))
        loss = model.loss(tokens, targets)
        loss.backward()
        zero.clip_grad_norm(shards(), comm, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with comm.record("loss"):
            losses.append(comm.all_reduce(loss.detach()).item() / comm.size)

    for step in range(steps - 1):
        one(step)
    history = measure.history(lambda: one(steps - 1), model, inner)
    held = history.only("weights", "gradients", "optimizer").peak.ledger.total
    if save:
        zero.save(save, model, optimizer)
    return losses, held


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--level",
        type=int,
        nargs="+",
        choices=(1, 2, 3),
        default=(1, 2, 3),
        help="one or more levels of ZeRO, trained one after the other",
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--engine",
        choices=("threads", "processes"),
        help="how ranks are made where torchrun has not made them",
    )
    parser.add_argument(
        "--ranks", type=int, default=4, help="their number, where torchrun has not chosen it"
    )
    parser.add_argument(
        "--load", help="go on from this snapshot, written by any number of ranks at any level"
    )
    parser.add_argument(
        "--save",
        help="write a snapshot there at the end; on a cluster, a folder that all nodes see",
    )
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", options.ranks))
    if BATCH % ranks:
        parser.error(
            f"{ranks} ranks do not divide the batch of {BATCH} sequences: take another number"
        )
    with World(ranks, options.engine) as world:
        for level in options.level:
            results = world.run(train, level, options.steps, options.load, options.save)
            losses, held = results[0]
            sent = [
                line.amount
                for line in world.ledger.only(rank=0)
                if line.name in ("reduce_scatter", "all_gather")
            ]
            if os.environ.get("RANK", "0") == "0":
                print(
                    f"level {level} on {ranks} rank{'s' * (ranks > 1)}:",
                    " ".join(f"{loss:.6f}" for loss in losses),
                )
                each = units.text(sum(sent) / options.steps)
                print(f"  rank 0 holds {units.text(held)} and sends {each} a step", flush=True)


if __name__ == "__main__":
    main()
