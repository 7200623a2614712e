"""3D parallelism in the style of Megatron-LM, on one page. To be read; needs torch only.

    torchrun --nproc_per_node=8 megatron_demo.py --tp 2 --pp 2 --dp 2 [--cpu]

World = TP x PP x DP. Tensor parallelism (TP) cuts the matrices inside a layer, pipeline
parallelism (PP) cuts the stack of layers into stages, data parallelism (DP) cuts the batch. Every
abstraction is explicit: which ranks form which group, which tensor travels when, and how many bytes
that is. At the end the first rank trains the same model alone, to show that nothing has changed but
where the work is done.
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

VOCAB, HIDDEN, HEADS, SEQ, MICRO_BATCH = 64, 32, 4, 16, 2

# --- Who works with whom --------------------------------------------------------------------------


class Layout(NamedTuple):
    """The three sizes. Neighbouring ranks share a layer, because TP talks most; DP talks least."""

    tp: int
    pp: int
    dp: int

    def groups(self, kind: str) -> list[list[int]]:
        """Return the groups of "tp", "pp" or "dp": ranks that differ in that coordinate only."""
        ranks = torch.arange(self.dp * self.pp * self.tp).view(self.dp, self.pp, self.tp)
        return ranks.movedim(("dp", "pp", "tp").index(kind), -1).flatten(0, 1).tolist()

    def describe(self, device: str) -> Iterator[str]:
        """Yield the lines of a picture of the layout."""
        for number, ranks in enumerate(self.groups("tp")):
            replica, stage = divmod(number, self.pp)
            if stage == 0:
                yield f"DP replica {replica}:"
            places = [f"{device} {rank} (tp={tp})" for tp, rank in enumerate(ranks)]
            yield f"  Stage {stage}: {', '.join(places)}" + "\n" * (stage == self.pp - 1)
        for kind, use in (
            ("tp", "AllReduce every forward"),
            ("pp", "send/recv activations"),
            ("dp", "AllReduce after backward"),
        ):
            groups = [f"[{','.join(map(str, group))}]" for group in self.groups(kind)]
            yield f"{kind.upper()} groups:  {', '.join(groups)}   <- {use}"


ALONE = Layout(1, 1, 1)


class Group:
    """This rank's peers in one dimension, and what it has told them, in messages and bytes.

    A group of one never communicates: single-process training is the same code with such groups.
    """

    def __init__(self, kind: str, layout: Layout = ALONE) -> None:
        groups, me = layout.groups(kind), dist.get_rank()
        self.size, self.ranks, self.index = len(groups[0]), [me], 0
        if self.size > 1:  # all ranks open all groups of a kind together, as torch requires
            self.handle, _ = dist.new_subgroups_by_enumeration(groups)
            self.ranks = next(ranks for ranks in groups if me in ranks)
            self.index = self.ranks.index(me)
        self.messages = self.bytes = 0
        self.pending: list[tuple[dist.Work | None, Tensor]] = []

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
        """Hand a tensor over; it leaves while this rank goes on computing."""
        self._count(tensor)
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self.ranks[to], group=self.handle, tag=tag)
        self.pending.append((work, tensor))  # memory must stay until the message has left

    def recv(self, like: Tensor, source: int, tag: int) -> Tensor:
        """Wait for a tensor of a known shape and fill it in."""
        dist.recv(like, self.ranks[source], group=self.handle, tag=tag)
        return like

    def wait(self) -> None:
        """Wait until everything that was handed over has arrived."""
        for work, _ in self.pending:
            assert work is not None
            work.wait()
        self.pending.clear()


# --- TP: a layer in pieces ------------------------------------------------------------------------


class ToPieces(torch.autograd.Function):
    """Every piece gets the same input; on the way back their gradients add up (AllReduce)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Group) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.tp.all_reduce(gradient.clone()), None


class FromPieces(torch.autograd.Function):
    """The outputs of the pieces add up (AllReduce); on the way back all get the same gradient."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, tp: Group) -> Tensor:
        return tp.all_reduce(x.clone())

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class ColumnParallel(nn.Module):
    """A linear layer of which this rank computes some outputs: nothing is sent in the forward."""

    def __init__(self, whole: Tensor, tp: Group) -> None:
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(whole.chunk(tp.size, dim=0)[tp.index].clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(ToPieces.apply(x, self.tp), self.weight)


class RowParallel(nn.Module):
    """A linear layer of which this rank has some inputs: the output is the sum over the ranks."""

    def __init__(self, whole: Tensor, tp: Group) -> None:
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(whole.chunk(tp.size, dim=1)[tp.index].clone())

    def forward(self, x: Tensor) -> Tensor:
        return FromPieces.apply(F.linear(x, self.weight), self.tp)


class Block(nn.Module):
    """A transformer block: attention by heads, MLP by columns, then by rows.

    Both come in a column-row pair, so that the large tensor between the two never travels.
    """

    def __init__(self, draw: torch.Generator, tp: Group) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.attend = ColumnParallel(matrix(3 * HIDDEN, HIDDEN, draw), tp)  # head by head
        self.project = RowParallel(matrix(HIDDEN, HIDDEN, draw), tp)
        self.up = ColumnParallel(matrix(4 * HIDDEN, HIDDEN, draw), tp)
        self.down = RowParallel(matrix(HIDDEN, 4 * HIDDEN, draw), tp)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq, hidden) to the same shape."""
        heads = self.attend(self.norms[0](x)).unflatten(-1, (-1, 3, HIDDEN // HEADS))
        query, key, value = heads.transpose(1, 2).unbind(3)  # (batch, own heads, seq, width)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def matrix(rows: int, columns: int, draw: torch.Generator) -> Tensor:
    """Draw a whole matrix; ranks that keep a piece of it draw the same whole."""
    return torch.randn(rows, columns, generator=draw) / columns**0.5


# --- PP: layers in stages -------------------------------------------------------------------------


class Stage(nn.Module):
    """Some consecutive blocks; the first stage has the embedding too, the last one the loss."""

    def __init__(self, index: int, count: int, layers: int, tp: Group) -> None:
        super().__init__()
        self.first, self.last = index == 0, index == count - 1
        draw, per_stage = torch.Generator(), layers // count
        if self.first:
            self.embedding = nn.Parameter(matrix(VOCAB, HIDDEN, draw.manual_seed(1)))
            self.positions = nn.Parameter(matrix(SEQ, HIDDEN, draw.manual_seed(2)))
        numbers = range(index * per_stage, (index + 1) * per_stage)
        # Seeded by its number, so that a block is the same wherever it lives.
        self.blocks = nn.Sequential(*(Block(draw.manual_seed(10 + n), tp) for n in numbers))
        if self.last:
            self.norm = nn.LayerNorm(HIDDEN)
            self.head = nn.Parameter(matrix(VOCAB, HIDDEN, draw.manual_seed(3)))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return what the next stage works on, or the loss."""
        if self.first:
            x = F.embedding(tokens[:, :-1], self.embedding) + self.positions
        x = self.blocks(x)
        if not self.last:
            return x
        logits = F.linear(self.norm(x), self.head)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Action(NamedTuple):
    """A piece of work: F forward, B backward (in halves: I for the input, W for the weights)."""

    stage: int
    kind: str
    microbatch: int


class Table(NamedTuple):
    """A pipeline schedule: where each stage lives, and what each rank does in which order."""

    rank_of: list[int]
    rows: list[list[Action]]


def gpipe(pp: int, microbatches: int) -> Table:
    """All forwards, then all backwards: the simplest schedule, and the one that keeps most."""
    order = [(kind, m) for kind in "FB" for m in range(microbatches)]
    return Table(list(range(pp)), [[Action(stage, *what) for what in order] for stage in range(pp)])


def table_of(name: str, pp: int, microbatches: int) -> Table:
    """Take a schedule of megatron_ext: 1f1b, interleaved, zb-h1, zb-v, ..."""
    if name == "gpipe":
        return gpipe(pp, microbatches)
    if pp == 1:
        stop(f"--schedule {name} needs a pipeline; take --pp 2 or more")
    from megatron_ext import errors, schedules

    try:
        found = schedules.generate(name, pp, microbatches)
    except errors.ScheduleError as error:
        stop(f"--schedule {error}")
    if found.placement.twins == 2 or found.disaggregated:
        stop(f"--schedule {name} runs on two copies of the model; take zb-v or 1f1b")
    rows = [[Action(*action) for action in row] for row in found.rows]
    return Table(list(found.placement.rank_of), rows)


class Pipeline:
    """This rank's stages, and how it walks through its row of the table."""

    def __init__(self, table: Table, layers: int, tp: Group, pp: Group, device: str) -> None:
        self.table, self.pp, self.device = table, pp, device
        count = len(table.rank_of)
        self.stages = {
            stage: Stage(stage, count, layers, tp).to(device)
            for stage, rank in enumerate(table.rank_of)
            if rank == pp.index
        }
        self.kept: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor | None]] = {}
        self.local: dict[Action, Tensor] = {}

    def step(self, batch: list[Tensor]) -> float:
        """Run all micro-batches, add gradients up, return the loss (0 if it is elsewhere)."""
        loss = 0.0
        for action in self.table.rows[self.pp.index]:
            if action.kind == "F":
                loss += self._forward(action, batch[action.microbatch]) / len(batch)
            else:
                self._backward(action, len(batch))
        self.pp.wait()
        return loss

    def _forward(self, action: Action, tokens: Tensor) -> float:
        stage = self.stages[action.stage]
        x = torch.empty(0) if stage.first else self._take(action).requires_grad_()
        output = stage(x, tokens)
        self.kept[action.stage, action.microbatch] = x, output, None
        if stage.last:
            return output.item()
        self._give(output.detach(), Action(action.stage + 1, "F", action.microbatch))
        return 0.0

    def _backward(self, action: Action, microbatches: int) -> None:
        stage, key = self.stages[action.stage], (action.stage, action.microbatch)
        x, output, gradient = self.kept.pop(key)
        if gradient is None:
            ones = torch.full_like(output, 1 / microbatches)
            gradient = ones if stage.last else self._take(action)
        wanted = list(stage.parameters()) if action.kind in "BW" else []
        onwards = action.kind in "BI" and not stage.first
        if wanted or onwards:
            leaves, halves = wanted + [x] * onwards, action.kind == "I"
            torch.autograd.backward(output, gradient, inputs=leaves, retain_graph=halves)
        if onwards:
            assert x.grad is not None
            self._give(x.grad, Action(action.stage - 1, "B", action.microbatch))
        if action.kind == "I":
            self.kept[key] = x, output, gradient  # W comes later

    def _give(self, tensor: Tensor, wanted: Action) -> None:
        """Send a tensor to the rank that wants it for an action; it may be this one."""
        rank = self.table.rank_of[wanted.stage]
        if rank == self.pp.index:
            self.local[wanted] = tensor
        else:
            self.pp.send(tensor, rank, self._tag(wanted))

    def _take(self, action: Action) -> Tensor:
        """Receive what an action works on: an activation from below, or a gradient from above."""
        wanted = action if action.kind == "F" else action._replace(kind="B")
        source = self.table.rank_of[action.stage + (-1 if action.kind == "F" else 1)]
        if source == self.pp.index:
            return self.local.pop(wanted)
        like = torch.empty(MICRO_BATCH, SEQ, HIDDEN, device=self.device)
        return self.pp.recv(like, source, self._tag(wanted))

    def _tag(self, wanted: Action) -> int:
        number = wanted.microbatch * len(self.table.rank_of) + wanted.stage
        return 2 * number + (wanted.kind == "B")


# --- DP: the batch in parts, and the training loop ------------------------------------------------


def sync_dp_gradients(parameters: list[nn.Parameter], dp: Group) -> None:
    """Average the gradients of all replicas: one flat AllReduce, once for each step."""
    flat = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    dp.all_reduce(flat).div_(dp.size)
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = part.view_as(p)


def sample(number: int, device: str) -> Tensor:
    """Draw a micro-batch by its number: the same in each step, so that it can be learned."""
    draw = torch.Generator().manual_seed(number)
    return torch.randint(VOCAB, (MICRO_BATCH, SEQ + 1), generator=draw).to(device)


def train(args: argparse.Namespace, table: Table, tp: Group, pp: Group, dp: Group) -> list[float]:
    """Train on this rank's part of everything; return its share of the loss of each step."""
    pipeline = Pipeline(table, args.layers, tp, pp, args.device)
    parameters = [p for stage in pipeline.stages.values() for p in stage.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    count = args.microbatches * args.dp // dp.size
    batch = [sample(dp.index * count + number, args.device) for number in range(count)]
    losses = []
    for _ in range(args.steps):
        optimizer.zero_grad()
        losses.append(pipeline.step(batch) / dp.size)
        sync_dp_gradients(parameters, dp)
        optimizer.step()
    return losses


# --- From the command line to what is printed -----------------------------------------------------


def arguments() -> argparse.Namespace:
    """Parse and check; a mistake ends in one line, told by one rank."""
    parser = argparse.ArgumentParser(description="3D parallelism on one page.")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--pp", type=int, default=1, help="pipeline-parallel size")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel size")
    parser.add_argument("--cpu", action="store_true", help="processes on this host, with gloo")
    parser.add_argument("--schedule", default="gpipe", help="gpipe, or one of megatron_ext")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=4, help="of each replica in a step")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    world, product = int(os.environ.get("WORLD_SIZE", "1")), args.tp * args.pp * args.dp
    if min(args.tp, args.pp, args.dp, args.layers, args.microbatches, args.steps) < 1:
        stop("all sizes are at least 1")
    if world != product:
        stop(
            f"world size {world} must equal tp x pp x dp = {args.tp} x {args.pp} x {args.dp} = "
            f"{product}: torchrun --nproc_per_node={product}"
        )
    if HEADS % args.tp:
        stop(f"--tp {args.tp} does not divide the {HEADS} attention heads; take 1, 2 or 4")
    if not args.cpu and not torch.cuda.is_available():
        stop("torch finds no GPU; add --cpu")
    args.device = "cpu" if args.cpu else f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return args


def stop(message: str) -> NoReturn:
    """End this process with a line for the user, and exit code 2."""
    if os.environ.get("RANK", "0") == "0":
        print(f"megatron_demo: error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(1)  # torchrun ends all processes as soon as one has ended
    sys.exit(2)


def traffic(groups: list[Group], args: argparse.Namespace) -> Iterator[str]:
    """Yield what all ranks together told each other in one step, by strategy."""
    yield "\ncommunication of one step, all ranks together:"
    uses = (
        "AllReduce of activations and their gradients, in every block",
        "send/recv of activations and their gradients, between stages",
        "AllReduce of all gradients, once",
    )
    for kind, group, use in zip(("TP", "PP", "DP"), groups, uses, strict=True):
        total = torch.tensor([group.messages, group.bytes], device=args.device)
        dist.all_reduce(total)
        messages, size = (total // args.steps).tolist()
        yield f"  {kind}  {messages:4} messages  {size:8} bytes   {use}"


def main() -> None:
    """Open the groups, train, and compare with one process."""
    args = arguments()
    layout = Layout(args.tp, args.pp, args.dp)
    table = table_of(args.schedule, args.pp, args.microbatches)
    if args.layers % len(table.rank_of):
        stop(f"--layers {args.layers} does not divide into {len(table.rank_of)} stages")
    if not args.cpu:
        torch.cuda.set_device(args.device)
    dist.init_process_group("gloo" if args.cpu else "nccl")
    groups = [Group(kind, layout) for kind in ("tp", "pp", "dp")]
    shares = torch.tensor(train(args, table, *groups), device=args.device)
    dist.all_reduce(shares)  # each rank of a last stage has one, and so have its TP peers
    losses = (shares / args.tp).tolist()
    lines = [*layout.describe("CPU" if args.cpu else "GPU"), *traffic(groups, args), ""]
    if dist.get_rank() == 0:
        print("\n".join(lines))
        alone = [Group(kind) for kind in ("tp", "pp", "dp")]
        reference = train(args, gpipe(1, args.microbatches * args.dp), *alone)
        for step, (loss, expected) in enumerate(zip(losses, reference, strict=True)):
            print(f"step {step}: loss {loss:.6f}, in a single process {expected:.6f}")
        gap = max(abs(a - b) for a, b in zip(losses, reference, strict=True))
        print(f"largest difference: {gap:.1e}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
