"""Turns hosts and options into one command for each host, in pure functions.

It computes world size, data-parallel size, batch size and addresses; users do not give them.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from megatron_ext.devices import VISIBLE_DEVICES
from megatron_ext.errors import LaunchError
from megatron_ext.tools.launch.hostfile import Host

if TYPE_CHECKING:
    from megatron_ext.tools.launch.runs import Json

__all__ = ["Node", "Parallel", "JobPlan", "flag_value"]

_BETWEEN_HOSTS = ("auto", "tcp", "rdma")  # values of --pipeline-transport that need --node-ips
_DEFAULT_PORT = 29500
_LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0", "::")  # noqa: S104 - refused


@dataclass(frozen=True)
class Node:
    """One host's part of a plan."""

    host: Host
    nproc: int
    """Processes on it; 0 until the host has counted its devices."""
    local: bool
    """True for the launcher's own machine, which needs no ssh."""


def flag_value(flags: Sequence[str], name: str) -> str | None:
    """Return the last value that a command line gives a flag, or None.

    The line is data here: it is of a job that starts on other machines, and only Megatron's parser,
    which runs there, knows all of its flags.
    """
    value = None
    for position, word in enumerate(flags):
        if word == name and position + 1 < len(flags):
            value = flags[position + 1]
        elif word.startswith(name + "="):
            value = word.partition("=")[2]
    return value


def _size(flags: Sequence[str], name: str) -> int:
    text = flag_value(flags, name) or "1"
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise LaunchError(f"{name} is {text!r}; it must be a positive integer")
    return int(text)


@dataclass(frozen=True)
class Parallel:
    """The parallel sizes in the training flags."""

    tensor: int
    pipeline: int
    context: int
    disaggregated: bool
    merged: bool

    @classmethod
    def of(cls, flags: Sequence[str]) -> Parallel:
        """Read it from training flags."""
        return cls(
            tensor=_size(flags, "--tensor-model-parallel-size"),
            pipeline=_size(flags, "--pipeline-model-parallel-size"),
            context=_size(flags, "--context-parallel-size"),
            disaggregated="--forward-backward-disaggregating" in flags,
            merged="--ignore-forward-tensor-parallel" in flags,
        )

    @property
    def replica_size(self) -> int:
        """Ranks that hold the model once.

        With forward and backward apart there is a second set of ranks for the forward passes, one
        instead of each tensor-parallel group if those are merged.
        """
        backward = self.tensor * self.context
        forward = self.context if self.merged else backward if self.disaggregated else 0
        return (backward + forward) * self.pipeline

    def data_parallel(self, world_size: int) -> int:
        """Return the number of model replicas on a number of ranks, which must fit."""
        if world_size % self.replica_size:
            raise LaunchError(
                f"{world_size} ranks cannot be divided into replicas of {self.replica_size} (TP "
                f"{self.tensor} x PP {self.pipeline} x CP {self.context}); change the hosts, "
                f"--nproc, or the parallel sizes"
            )
        return world_size // self.replica_size


@dataclass(frozen=True)
class JobPlan:
    """A job as it is known before it starts."""

    run_id: str
    nodes: tuple[Node, ...]
    command: tuple[str, ...]
    """The script and its flags, or any command with `per_node`."""
    workdir: str
    python: str
    env: Mapping[str, str] = field(default_factory=dict)
    master_port: int | None = None
    """None: one that is free, chosen on the first host."""
    per_node: bool = False
    """Run the command once on each host, without torchrun."""
    log_root: str | None = None
    grace_s: float = 5.0
    """Grace period. After a failure a job ends within about twice this time: first the peers on the
    same host, then the other hosts."""
    silence_s: float = 60.0
    slurm_job: str | None = None
    """The Slurm job whose allocation it runs in."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.first_rank(len(self.nodes))

    def first_rank(self, index: int) -> int:
        """Return the global rank of a host's first process."""
        return sum(node.nproc for node in self.nodes[:index])

    def with_devices(self, counts: Sequence[int]) -> JobPlan:
        """Return the plan with the numbers of devices that the hosts found filled in."""
        nodes = []
        for node, count in zip(self.nodes, counts, strict=True):
            if node.nproc == 0 and count == 0:
                raise LaunchError(
                    f"{node.host.name}: no devices were found there; say how many processes to "
                    f"start, with slots=N in the hostfile or --nproc N"
                )
            nodes.append(replace(node, nproc=node.nproc or count))
        return replace(self, nodes=tuple(nodes))

    def check(self, *, allow_uneven: bool) -> None:
        """Refuse hosts with different numbers of processes, or that cannot reach each other."""
        if self.per_node or len(self.nodes) == 1:
            return
        if not allow_uneven and len({node.nproc for node in self.nodes if node.nproc}) > 1:
            shown = ", ".join(f"{node.host.name} {node.nproc}" for node in self.nodes)
            raise LaunchError(
                f"the hosts have different numbers of processes ({shown}); give them equal slots, "
                f"--nproc N, or --allow-uneven"
            )
        for node in self.nodes:
            if node.host.address in _LOOPBACK:
                raise LaunchError(
                    f"{node.host.name}: the other hosts cannot reach it by this name; give its "
                    f"address with addr=IP in the hostfile"
                )

    def completed(self, num_microbatches: int | None, *, allow_uneven: bool) -> JobPlan:
        """Return the plan with the training flags added that follow from its hosts.

        `--global-batch-size` if the number of micro-batches was given; `--node-ips` if the script
        requests a transport that needs addresses. All numbers of processes are known.
        """
        self.check(allow_uneven=allow_uneven)
        if self.per_node:
            return self
        flags, added = self.command[1:], list[str]()
        data = Parallel.of(flags).data_parallel(self.world_size)
        if num_microbatches is not None:
            if flag_value(flags, "--global-batch-size") is not None:
                raise LaunchError(
                    "--num-microbatches and --global-batch-size are both given; one follows from "
                    "the other, so leave one out"
                )
            samples = num_microbatches * _size(flags, "--micro-batch-size") * data
            added += ["--global-batch-size", str(samples)]
        needs_addresses = flag_value(flags, "--pipeline-transport") in _BETWEEN_HOSTS
        if needs_addresses and len(self.nodes) > 1 and flag_value(flags, "--node-ips") is None:
            # One for each host, or for each rank where hosts have different numbers of them.
            is_even = len({node.nproc for node in self.nodes}) == 1
            added.append("--node-ips")
            for node in self.nodes:
                added += [*node.host.rdma, node.host.address][:1] * (1 if is_even else node.nproc)
        return replace(self, command=(*self.command, *added))

    def environment(self, index: int) -> dict[str, str]:
        """Return the variables that the job gets on a host, in addition to those of the login."""
        host = self.nodes[index].host
        devices = ",".join(map(str, host.devices or ()))
        return {
            **self.env,
            **dict(host.env),
            **dict.fromkeys(VISIBLE_DEVICES * bool(devices), devices),
        }

    def _torchrun_words(self, index: int, port: int, *more: str) -> list[str]:
        # Alone, a host needs no name that others could resolve.
        master = "127.0.0.1" if len(self.nodes) == 1 else self.nodes[0].host.address
        return [
            "--nnodes", str(len(self.nodes)), "--node-rank", str(index),
            "--nproc-per-node", str(self.nodes[index].nproc),
            "--master-addr", master, "--master-port", str(port), "--max-restarts", "0", *more,
            "-m", "megatron_ext", *self.command,
        ]  # fmt: skip

    def agent_argv(self, index: int, found: Json, port: int, show: Sequence[int]) -> list[str]:
        """Return what the agent of a host starts, from its fitness.

        The ranks meet at a port of the first host. `show`: local ranks whose output is shown.
        """
        if self.per_node:
            return list(self.command)
        logs = found["log_dir"]
        more = ["--local-addr", found["address"]] if "address" in found else []
        more += ["--rdzv-id", self.run_id, "--log-dir", f"{logs}/ranks", "--redirects", "3"]
        # Files of all ranks (3: both streams); those to show are followed besides.
        more += ["--tee", ",".join(f"{rank}:3" for rank in show)] if show else []
        elastic = [self.python, "-m", "megatron_ext.tools.launch.elastic"]
        report = [f"{logs}/failure.json", f"{self.grace_s:g}"]
        return [*elastic, *report, *self._torchrun_words(index, port, *more)]

    def request(self, index: int, op: str = "run") -> Json:
        """Return the first message to the agent of a host: its part of this plan."""
        node = self.nodes[index]
        peer = self.nodes[1 if index == 0 else 0] if len(self.nodes) > 1 else None
        # Without the flags: an agent gets its whole command when the job starts.
        whole = replace(self, nodes=(), command=self.command[:1], env=self.environment(index))
        return {
            **asdict(whole),
            "op": op,
            "node": index,
            "host": node.host.name,
            "nproc": node.nproc,
            "peer": peer.host.address if peer and not self.per_node else None,
        }

    def record(self) -> Json:
        """Return what `stop`, `status` and `logs` need, as JSON; values of variables stay out."""
        nodes = [replace(node, host=replace(node.host, env=())) for node in self.nodes]
        return asdict(replace(self, env={}, nodes=tuple(nodes)))

    @classmethod
    def of_record(cls, found: Json) -> JobPlan:
        """Return the plan of a record; KeyError or TypeError: it is of another version."""
        nodes = [Node(Host(**n["host"]), n["nproc"], local=n["local"]) for n in found["nodes"]]
        return cls(**{**found, "nodes": tuple(nodes)})

    def dry_run(self) -> str:
        """Return the command of each host, to run by hand if there is no ssh."""
        parts = []
        for index, node in enumerate(self.nodes):
            words = list(self.command)
            if not self.per_node:
                torchrun = [self.python, "-m", "torch.distributed.run"]
                words = torchrun + self._torchrun_words(index, self.master_port or _DEFAULT_PORT)
            environment = self.environment(index).items()
            assigned = [f"{name}={_quoted(value)}" for name, value in sorted(environment)]
            line = " ".join([f"cd {_quoted(self.workdir)} &&", *assigned, *map(_quoted, words)])
            parts.append(f"# {node.host.name}\n{line}\n")
        return "\n".join(parts)

    def summary(self) -> str:
        """Return one line: hosts, ranks, how the model is cut, the batch."""
        hosts = f"{len(self.nodes)} host{'s' if len(self.nodes) > 1 else ''}"
        if self.per_node:
            return f"{hosts}, one command on each"
        sizes, batch = Parallel.of(self.command), flag_value(self.command, "--global-batch-size")
        return (
            f"{hosts}, {self.world_size} ranks: TP {sizes.tensor}, PP {sizes.pipeline}, CP "
            f"{sizes.context}, DP {sizes.data_parallel(self.world_size)}"
            + (", forward and backward apart" if sizes.disaggregated or sizes.merged else "")
            + (f"; {batch} samples in a step" if batch is not None else "")
        )


def _quoted(word: str) -> str:
    """Return a word for bash that shows what would steer the terminal."""
    if word.isprintable():
        return shlex.quote(word)
    kept = (c if c.isprintable() and c not in "'\\" else f"\\U{ord(c):08x}" for c in word)
    return f"$'{''.join(kept)}'"
