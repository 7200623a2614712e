"""Turns hosts and options into one command for each host, in pure functions.

It computes world size, data-parallel size, batch size and addresses; users do not give them.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from megatron_ext.devices.count import VISIBLE_DEVICES
from megatron_ext.errors import LaunchError
from megatron_ext.tools.launch.hostfile import Host

if TYPE_CHECKING:
    from megatron_ext.tools.launch.runs import Message

__all__ = ["Node", "Parallel", "Plan", "add_computed_flags", "flag_value"]

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
    """Whether it is the launcher's own machine, which needs no ssh."""


@dataclass(frozen=True)
class Parallel:
    """The parallel sizes in the training flags."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    disaggregated: bool = False
    merged: bool = False

    @classmethod
    def of(cls, flags: Sequence[str]) -> Parallel:
        """Read it from training flags.

        Raises:
            LaunchError: A size is not a positive number.
        """
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
        tensor = self.tensor * self.context
        if self.merged:
            tensor += 1
        elif self.disaggregated:
            tensor *= 2
        return tensor * self.pipeline

    def data_parallel(self, world_size: int) -> int:
        """Return the number of model replicas on a number of ranks.

        Raises:
            LaunchError: It is not a multiple of the replica size.
        """
        if world_size % self.replica_size:
            raise LaunchError(
                f"{world_size} ranks cannot be divided into replicas of {self.replica_size} (TP "
                f"{self.tensor} x PP {self.pipeline} x CP {self.context}); change the hosts, "
                f"--nproc, or the parallel sizes"
            )
        return world_size // self.replica_size


@dataclass(frozen=True)
class Plan:
    """Everything about a job before it starts."""

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
        return sum(node.nproc for node in self.nodes)

    @property
    def master_address(self) -> str:
        """Where the ranks meet."""
        return "127.0.0.1" if len(self.nodes) == 1 else self.nodes[0].host.address

    def first_rank(self, index: int) -> int:
        """Return the global rank of a host's first process."""
        return sum(node.nproc for node in self.nodes[:index])

    def with_devices(self, counts: Sequence[int]) -> Plan:
        """Return the plan with the numbers of devices that the hosts found filled in.

        Raises:
            LaunchError: A host without `slots` has no devices.
        """
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
        """Refuse a plan that cannot run.

        Raises:
            LaunchError: Hosts have different numbers of processes, or cannot reach each other.
        """
        counts = {node.nproc for node in self.nodes if node.nproc}
        if len(counts) > 1 and not allow_uneven and not self.per_node:
            shown = ", ".join(f"{node.host.name} {node.nproc}" for node in self.nodes)
            raise LaunchError(
                f"the hosts have different numbers of processes ({shown}); give them equal slots, "
                f"--nproc N, or --allow-uneven"
            )
        for node in self.nodes if len(self.nodes) > 1 and not self.per_node else ():
            if node.host.address in _LOOPBACK:
                raise LaunchError(
                    f"{node.host.name}: the other hosts cannot reach it by this name; give its "
                    f"address with addr=IP in the hostfile"
                )

    def environment(self, index: int) -> dict[str, str]:
        """Return the variables that the job gets on a host, in addition to those of the login."""
        host = self.nodes[index].host
        variables = {**self.env, **dict(host.env)}
        if host.devices is not None:
            visible = ",".join(map(str, host.devices))
            variables.update(dict.fromkeys(VISIBLE_DEVICES, visible))
        return variables

    def _torchrun_flags(self, index: int, port: int) -> list[str]:
        return [
            "--nnodes", str(len(self.nodes)),
            "--node-rank", str(index),
            "--nproc-per-node", str(self.nodes[index].nproc),
            "--master-addr", self.master_address,
            "--master-port", str(port),
            "--max-restarts", "0",
        ]  # fmt: skip

    def _job_words(self) -> list[str]:
        return ["-m", "megatron_ext", *self.command]

    def agent_argv(self, index: int, found: Message, port: int, show: Sequence[int]) -> list[str]:
        """Return what the agent of a host starts.

        Args:
            index: The rank of the host.
            found: Its fitness: where its logs are, its address as it is reached from the others.
            port: Where the ranks meet, on the first host.
            show: Local ranks whose output to show.
        """
        if self.per_node:
            return list(self.command)
        return [
            self.python, "-m", "megatron_ext.tools.launch.elastic",
            f"{found['log_dir']}/failure.json", f"{self.grace_s:g}",
            *self._torchrun_flags(index, port),
            *(["--local-addr", found["address"]] if "address" in found else []),
            "--rdzv-id", self.run_id, "--log-dir", f"{found['log_dir']}/ranks", "--redirects", "3",
            *(["--tee", ",".join(f"{rank}:3" for rank in show)] if show else []),
            *self._job_words(),
        ]  # fmt: skip

    def request(self, index: int, op: str = "run") -> Message:
        """Return the first message to the agent of a host."""
        node = self.nodes[index]
        peer = self.nodes[1 if index == 0 else 0] if len(self.nodes) > 1 else None
        return {
            "op": op,
            "run_id": self.run_id,
            "node": index,
            "host": node.host.name,
            "nproc": node.nproc,
            "workdir": self.workdir,
            "log_root": self.log_root,
            "env": self.environment(index),
            "command": self.command[0],
            "per_node": self.per_node,
            "master_port": self.master_port,
            "peer": peer.host.address if peer and not self.per_node else None,
            "grace_s": self.grace_s,
            "silence_s": self.silence_s,
        }

    def record(self) -> Message:
        """Return what `stop`, `status` and `logs` need, as JSON; values of variables stay out."""
        hosts = [replace(node.host, env=()) for node in self.nodes]
        nodes = [replace(node, host=host) for node, host in zip(self.nodes, hosts, strict=True)]
        return asdict(replace(self, env={}, nodes=tuple(nodes)))

    @classmethod
    def of_record(cls, found: Message) -> Plan:
        """Return the plan of a record.

        Raises:
            KeyError, TypeError: It is of another version.
        """
        nodes = [Node(Host(**n["host"]), n["nproc"], local=n["local"]) for n in found["nodes"]]
        return cls(**{**found, "nodes": tuple(nodes)})

    def dry_run(self) -> str:
        """Return the command of each host, to run by hand if there is no ssh."""
        parts = []
        for index, node in enumerate(self.nodes):
            words = list(self.command)
            if not self.per_node:
                flags = self._torchrun_flags(index, self.master_port or _DEFAULT_PORT)
                words = [self.python, "-m", "torch.distributed.run", *flags, *self._job_words()]
            assigned = [f"{k}={_quoted(v)}" for k, v in sorted(self.environment(index).items())]
            line = " ".join([*assigned, *map(_quoted, words)])
            parts.append(f"# {node.host.name}\ncd {_quoted(self.workdir)} && {line}\n")
        return "\n".join(parts)

    def summary(self) -> str:
        """Return one line: hosts, ranks, how the model is cut, the batch."""
        hosts = f"{len(self.nodes)} host{'s' if len(self.nodes) > 1 else ''}"
        if self.per_node:
            return f"{hosts}, one command on each"
        parallel, batch = Parallel.of(self.command), flag_value(self.command, "--global-batch-size")
        return (
            f"{hosts}, {self.world_size} ranks: TP {parallel.tensor}, PP {parallel.pipeline}, CP "
            f"{parallel.context}, DP {parallel.data_parallel(self.world_size)}"
            + (", forward and backward apart" if parallel.disaggregated or parallel.merged else "")
            + (f"; {batch} samples in a step" if batch is not None else "")
        )


def add_computed_flags(plan: Plan, num_microbatches: int | None) -> Plan:
    """Return the plan with the training flags that follow from its hosts added.

    `--global-batch-size` if the number of micro-batches was given; `--node-ips` if the script
    requests a transport that needs addresses.

    Raises:
        LaunchError: The ranks do not fit the parallel sizes, or the batch is given twice.
    """
    flags, nodes, added = plan.command[1:], plan.nodes, []
    data = Parallel.of(flags).data_parallel(plan.world_size)
    if num_microbatches is not None:
        if flag_value(flags, "--global-batch-size") is not None:
            raise LaunchError(
                "--num-microbatches and --global-batch-size are both given; one follows from the "
                "other, so leave one out"
            )
        samples = num_microbatches * _size(flags, "--micro-batch-size") * data
        added += ["--global-batch-size", str(samples)]
    needs_addresses = flag_value(flags, "--pipeline-transport") in _BETWEEN_HOSTS
    if needs_addresses and len(nodes) > 1 and flag_value(flags, "--node-ips") is None:
        # One for each host, or for each rank where hosts have different numbers of them.
        is_even = len({node.nproc for node in nodes}) == 1
        addresses = [node.host.rdma[0] if node.host.rdma else node.host.address for node in nodes]
        times = [1 if is_even else node.nproc for node in nodes]
        added.append("--node-ips")
        for address, count in zip(addresses, times, strict=True):
            added += [address] * count
    return replace(plan, command=(*plan.command, *added))


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
    text = flag_value(flags, name)
    if text is None:
        return 1
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise LaunchError(f"{name} is {text!r}; it must be a positive integer")
    return int(text)


def _quoted(word: str) -> str:
    """Quote a word for bash, with control characters of terminals escaped."""
    if word.isprintable():
        return shlex.quote(word)
    plain = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_=+/.,: "
    escaped = (chr(byte) if byte in plain else f"\\x{byte:02x}" for byte in os.fsencode(word))
    return f"$'{''.join(escaped)}'"
