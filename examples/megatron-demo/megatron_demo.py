"""3D parallelism in the style of Megatron-LM in one readable file that requires only torch.

    torchrun --nproc_per_node=8 megatron_demo.py --tp 2 --pp 2 --dp 2 [--cpu]

World = TP x PP x DP. Tensor parallelism (TP) splits the matrices of a layer, pipeline parallelism
(PP) splits the layers into stages, and data parallelism (DP) splits the batch. The demo prints the
groups of ranks, and the tensors and bytes that they send. At the end, the first rank trains the
same model alone, with the same losses.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

VOCAB, HIDDEN, HEADS, LAYERS, SEQ, MICRO_BATCH, STEPS = 64, 32, 4, 8, 16, 2, 5
TALK = {  # the communication of each dimension: a short and a full description
    "tp": (
        "AllReduce every forward",
        "AllReduce of activations and gradients, in every block",
    ),
    "pp": (
        "send/recv activations",
        "send/recv of activations and gradients, between stages",
    ),
    "dp": ("AllReduce after backward", "AllReduce of all gradients, once"),
}

# --- Who works with whom --------------------------------------------------------------------------


class Layout(NamedTuple):
    """The three sizes. Neighbouring ranks form TP groups, which communicate most."""

    tp: int
    pp: int
    dp: int

    def groups(self, kind: str) -> list[list[int]]:
        """Return the groups of "tp", "pp" or "dp": ranks that differ only in this coordinate."""
        ranks = torch.arange(self.dp * self.pp * self.tp).view(
            self.dp, self.pp, self.tp
        )
        return ranks.movedim(("dp", "pp", "tp").index(kind), -1).flatten(0, 1).tolist()

    def describe(self, device: str) -> Iterator[str]:
        """Yield the lines of a text that shows the layout."""
        for number, ranks in enumerate(self.groups("tp")):
            replica, stage = divmod(number, self.pp)
            if stage == 0:
                yield f"DP replica {replica}:"
            places = [f"{device} {rank} (tp={tp})" for tp, rank in enumerate(ranks)]
            yield f"  Stage {stage}: {', '.join(places)}" + "\n" * (
                stage == self.pp - 1
            )
        for kind, (use, _) in TALK.items():
            groups = [f"[{','.join(map(str, group))}]" for group in self.groups(kind)]
            yield f"{kind.upper()} groups:  {', '.join(groups)}   <- {use}"


class Group:
    """This rank's peers in one dimension, and the messages and bytes that it has sent to them.

    A group of one never communicates, so single-process training uses the same code.
    """

    def __init__(self, kind: str, layout: Layout) -> None:
        groups, me = layout.groups(kind), dist.get_rank()
        self.ranks = next(ranks for ranks in groups if me in ranks)
        self.size, self.index = len(self.ranks), self.ranks.index(me)
        if self.size > 1:  # torch requires that all ranks create all groups together
            self.handle, _ = dist.new_subgroups_by_enumeration(groups)
        self.messages = self.bytes = 0
        self.pending: list[
            tuple[Any, Tensor]
        ] = []  # keeps the memory of tensors until they have been sent

    def _count(self, tensor: Tensor) -> None:
        self.messages += 1
        self.bytes += tensor.nbytes

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the group, in place."""
        if self.size > 1:
            self._count(tensor)
            dist.all_reduce(tensor, group=self.handle)
        return tensor

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Start sending a tensor. The rank continues to compute in the meantime."""
        self._count(tensor)
        work = dist.isend(tensor, self.ranks[to], group=self.handle, tag=tag)
        self.pending.append((work, tensor))

    def recv(self, like: Tensor, source: int, tag: int) -> Tensor:
        """Wait for a tensor of a known shape, and receive it into the given tensor."""
        dist.recv(like, self.ranks[source], group=self.handle, tag=tag)
        return like

    def wait(self) -> None:
        """Wait until all sends have completed."""
        for work, _ in self.pending:
            work.wait()
        self.pending.clear()


# --- TP: a layer in pieces ------------------------------------------------------------------------


class ColumnParallel(nn.Module):
    """A linear layer of which this rank computes some outputs. The forward sends nothing."""

    def __init__(self, whole: Tensor, tp: Group) -> None:
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(whole.chunk(tp.size, dim=0)[tp.index].clone())

    def forward(self, x: Tensor) -> Tensor:
        x = x.view_as(
            x
        )  # on the way back, the gradients of what all ranks share add up
        x.register_hook(lambda gradient: self.tp.all_reduce(gradient.clone()))
        return F.linear(x, self.weight)


class RowParallel(nn.Module):
    """A linear layer of which this rank has some inputs. The output is the sum over the ranks."""

    def __init__(self, whole: Tensor, tp: Group) -> None:
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(whole.chunk(tp.size, dim=1)[tp.index].clone())

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        self.tp.all_reduce(
            y.detach()
        )  # in place and unseen by autograd: gradients pass unchanged
        return y


class Block(nn.Module):
    """A transformer block: attention by heads, MLP by columns, then by rows.

    Both are a column layer and a row layer, so the large tensor in between is never sent.
    """

    def __init__(self, draw: torch.Generator, tp: Group) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.attend = ColumnParallel(
            matrix(3 * HIDDEN, HIDDEN, draw), tp
        )  # head by head
        self.project = RowParallel(matrix(HIDDEN, HIDDEN, draw), tp)
        self.up = ColumnParallel(matrix(4 * HIDDEN, HIDDEN, draw), tp)
        self.down = RowParallel(matrix(HIDDEN, 4 * HIDDEN, draw), tp)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq, hidden) to the same shape."""
        heads = self.attend(self.norms[0](x)).unflatten(-1, (-1, 3, HIDDEN // HEADS))
        query, key, value = heads.transpose(1, 2).unbind(
            3
        )  # (batch, own heads, seq, width)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def matrix(rows: int, columns: int, draw: torch.Generator) -> Tensor:
    """Draw a complete matrix. All ranks that keep a piece of it draw the same matrix."""
    return torch.randn(rows, columns, generator=draw) / columns**0.5


# --- PP: layers in stages -------------------------------------------------------------------------


class Stage(nn.Module):
    """Consecutive blocks. The first stage also has the embedding, and the last has the loss."""

    def __init__(self, index: int, count: int, tp: Group) -> None:
        super().__init__()
        self.first, self.last = index == 0, index == count - 1
        draw, per_stage = torch.Generator(), LAYERS // count
        if self.first:
            self.embedding = nn.Parameter(matrix(VOCAB, HIDDEN, draw.manual_seed(1)))
            self.positions = nn.Parameter(matrix(SEQ, HIDDEN, draw.manual_seed(2)))
        numbers = range(index * per_stage, (index + 1) * per_stage)
        # Each block is seeded by its number, so its weights do not depend on its rank.
        self.blocks = nn.Sequential(
            *(Block(draw.manual_seed(10 + n), tp) for n in numbers)
        )
        if self.last:
            self.norm = nn.LayerNorm(HIDDEN)
            self.head = nn.Parameter(matrix(VOCAB, HIDDEN, draw.manual_seed(3)))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return the input of the next stage, or the loss."""
        if self.first:
            x = F.embedding(tokens[:, :-1], self.embedding) + self.positions
        x = self.blocks(x)
        if not self.last:
            return x
        logits = F.linear(self.norm(x), self.head)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Action(NamedTuple):
    """A unit of work: F (forward), or B (backward) or its halves I (input) and W (weights)."""

    stage: int
    kind: str
    microbatch: int

    def tag(self) -> int:
        """Return a unique tag for the message that this action works on."""
        return self.stage << 20 | self.microbatch << 1 | (self.kind == "F")


def gpipe(pp: int, microbatches: int) -> list[list[Action]]:
    """Run all forwards, then all backwards: the simplest schedule, which needs the most memory."""
    order = [(kind, m) for kind in "FB" for m in range(microbatches)]
    return [[Action(stage, *what) for what in order] for stage in range(pp)]


def table(name: str, pp: int, microbatches: int) -> list[list[Action]]:
    """Return the ordered actions of each rank. All names except gpipe require megatron_ext."""
    if name == "gpipe":
        return gpipe(pp, microbatches)
    from megatron_ext import errors, schedules

    try:
        found = schedules.generate(name, pp, microbatches)
    except errors.ScheduleError as error:
        stop(f"--schedule {error}")
    if found.placement.twins == 2 or found.disaggregated:
        stop(f"--schedule {name} runs on two copies of the model; take zb-v or 1f1b")
    return [[Action(*action[:3]) for action in row] for row in found.rows]


class Pipeline:
    """This rank's stages, and the loop that runs its row of the table."""

    def __init__(
        self, rows: list[list[Action]], tp: Group, pp: Group, device: str
    ) -> None:
        self.row, self.pp, self.device = rows[pp.index], pp, device
        self.rank_of = {
            action.stage: rank for rank, row in enumerate(rows) for action in row
        }
        if LAYERS % len(self.rank_of):
            stop(f"{LAYERS} layers do not divide into {len(self.rank_of)} stages")
        mine = sorted({action.stage for action in self.row})
        self.stages = {n: Stage(n, len(self.rank_of), tp).to(device) for n in mine}
        self.kept: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor | None]] = {}
        self.local: dict[Action, Tensor] = {}

    def step(self, batch: list[Tensor]) -> float:
        """Run all micro-batches, sum gradients, return the loss (0 if another rank has it)."""
        loss = 0.0
        for action in self.row:
            if action.kind == "F":
                loss += self._forward(action, batch)
            else:
                self._backward(action)
        self.pp.wait()
        return loss

    def _forward(self, action: Action, batch: list[Tensor]) -> float:
        stage = self.stages[action.stage]
        x = torch.empty(0) if stage.first else self._take(action).requires_grad_()
        output = stage(x, batch[action.microbatch])
        if stage.last:
            output = output / len(
                batch
            )  # the loss of a step is the mean of its micro-batches
        else:
            self._give(
                output.detach(), Action(action.stage + 1, "F", action.microbatch)
            )
        self.kept[action.stage, action.microbatch] = x, output, None
        return output.item() if stage.last else 0.0

    def _backward(self, action: Action) -> None:
        stage, key = self.stages[action.stage], (action.stage, action.microbatch)
        x, output, gradient = self.kept.pop(key)
        if gradient is None and not stage.last:
            gradient = self._take(action._replace(kind="B"))
        onwards, again = action.kind in "BI" and not stage.first, action.kind == "I"
        leaves = [x] * onwards + list(stage.parameters()) * (action.kind in "BW")
        if leaves:
            torch.autograd.backward(output, gradient, inputs=leaves, retain_graph=again)
        if onwards:
            self._give(x.grad, Action(action.stage - 1, "B", action.microbatch))
        if again:
            self.kept[key] = x, output, gradient  # W comes later

    def _give(self, tensor: Tensor, wanted: Action) -> None:
        """Send a tensor to the rank that needs it for an action, which may be this rank."""
        rank = self.rank_of[wanted.stage]
        if rank == self.pp.index:
            self.local[wanted] = tensor
        else:
            self.pp.send(tensor, rank, wanted.tag())

    def _take(self, wanted: Action) -> Tensor:
        """Receive the input of an action: an activation or a gradient from a neighbouring stage."""
        source = self.rank_of[wanted.stage + (-1 if wanted.kind == "F" else 1)]
        if source == self.pp.index:
            return self.local.pop(wanted)
        like = torch.empty(MICRO_BATCH, SEQ, HIDDEN, device=self.device)
        return self.pp.recv(like, source, wanted.tag())


# --- DP: the batch in parts, and the training loop ------------------------------------------------


def sync_dp_gradients(parameters: list[nn.Parameter], dp: Group) -> None:
    """Average the gradients of all replicas with one flat AllReduce per step."""
    flat = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    dp.all_reduce(flat).div_(dp.size)
    for p, part in zip(
        parameters, flat.split([p.numel() for p in parameters]), strict=True
    ):
        p.grad = part.view_as(p)


def sample(number: int) -> Tensor:
    """Draw a micro-batch by its number. It is the same in each step, so it can be learned."""
    draw = torch.Generator().manual_seed(number)
    return torch.randint(VOCAB, (MICRO_BATCH, SEQ + 1), generator=draw)


def train(
    rows: list[list[Action]], count: int, groups: list[Group], device: str
) -> list[float]:
    """Train this rank's part of the model and data. Return its share of the loss of each step."""
    tp, pp, dp = groups
    pipeline = Pipeline(rows, tp, pp, device)
    parameters = [p for stage in pipeline.stages.values() for p in stage.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    batch = [sample(dp.index * count + number).to(device) for number in range(count)]
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(pipeline.step(batch) / dp.size)
        sync_dp_gradients(parameters, dp)
        optimizer.step()
    return losses


# --- From the command line to what is printed -----------------------------------------------------


def arguments() -> argparse.Namespace:
    """Parse and check the flags. One rank prints a mistake in one line."""
    parser = argparse.ArgumentParser(description="3D parallelism on one page.")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--pp", type=int, default=1, help="pipeline-parallel size")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel size")
    parser.add_argument(
        "--cpu", action="store_true", help="processes on this host, with gloo"
    )
    parser.add_argument(
        "--schedule", default="gpipe", help="gpipe, or one of megatron_ext"
    )
    parser.add_argument(
        "--microbatches", type=int, default=4, help="of each replica in a step"
    )
    args = parser.parse_args()
    if not args.cpu and not torch.cuda.is_available():
        stop("torch finds no GPU; add --cpu")
    world, product = int(os.environ.get("WORLD_SIZE", "0")), args.tp * args.pp * args.dp
    if min(args.tp, args.pp, args.dp, args.microbatches) < 1:
        stop("all sizes are at least 1")
    if world != product:
        stop(
            f"world size {world} must equal tp x pp x dp = {args.tp} x {args.pp} x {args.dp} = "
            f"{product}: torchrun --nproc_per_node={product}"
        )
    if HEADS % args.tp:
        stop(
            f"--tp {args.tp} does not divide the {HEADS} attention heads; take 1, 2 or 4"
        )
    args.device = "cpu" if args.cpu else f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return args


def stop(message: str) -> NoReturn:
    """Print an error line for the user and exit with code 2."""
    if os.environ.get("RANK", "0") == "0":
        print(f"megatron_demo: error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(1)  # torchrun ends all processes as soon as one has ended
    sys.exit(2)


def traffic(groups: list[Group], device: str) -> Iterator[str]:
    """Yield the total communication of all ranks in one step for each kind of parallelism."""
    yield "\ncommunication of one step, all ranks together:"
    for group, (kind, (_, use)) in zip(groups, TALK.items(), strict=True):
        total = torch.tensor([group.messages, group.bytes], device=device)
        dist.all_reduce(total)
        messages, size = (total // STEPS).tolist()
        yield f"  {kind.upper()}  {messages:4} messages  {size:8} bytes   {use}"


def main() -> None:
    """Create the groups, train, and compare the losses with those of a single process."""
    args = arguments()
    layout, count = Layout(args.tp, args.pp, args.dp), args.microbatches
    rows = table(args.schedule, args.pp, count)
    if not args.cpu:
        torch.cuda.set_device(args.device)
    dist.init_process_group("gloo" if args.cpu else "nccl")
    groups = [Group(kind, layout) for kind in TALK]
    shares = torch.tensor(train(rows, count, groups, args.device), device=args.device)
    dist.all_reduce(
        shares
    )  # each rank of a last stage has one, and so have its TP peers
    losses = (shares / args.tp).tolist()
    lines = [
        *layout.describe("CPU" if args.cpu else "GPU"),
        *traffic(groups, args.device),
        "",
    ]
    if dist.get_rank() == 0:
        print("\n".join(lines))
        alone = [Group(kind, Layout(1, 1, 1)) for kind in TALK]
        reference = train(
            gpipe(1, count * args.dp), count * args.dp, alone, args.device
        )
        for step, (loss, expected) in enumerate(zip(losses, reference, strict=True)):
            print(f"step {step}: loss {loss:.6f}, in a single process {expected:.6f}")
        gap = max(abs(a - b) for a, b in zip(losses, reference, strict=True))
        print(f"largest difference: {gap:.1e}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
