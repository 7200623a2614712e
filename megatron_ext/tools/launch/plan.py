"""Pure functions that turn hosts and options into one command per host.

The world size, data-parallel size, batch size and addresses are derived, so users need not set
them.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from megatron_ext.config.flags import requested_flags
from megatron_ext.config.sizes import JobSizes
from megatron_ext.errors import ArgumentsError, LaunchError
from megatron_ext.tools.launch.hostfile import Host
from megatron_ext.tools.launch.runs import runs_root

if TYPE_CHECKING:
    from megatron_ext.tools.launch.runs import Json

FORWARDED = (
    "NCCL_", "MCCL_", "NVSHMEM_", "GLOO_", "UCX_", "TORCH_", "PYTORCH_", "NVTE_", "CUDA_",
    "CUBLAS_", "CUDNN_", "MUSA_", "OMP_", "MEGATRON_", "HF_", "PYTHONPATH", "PYTHONWARNINGS",
)  # fmt: skip
"""Prefixes of the environment variables that are forwarded from the launcher to every host."""
_SECRET = re.compile("TOKEN|SECRET|PASSW|KEY|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
# Values of --pipeline-transport that need --node-ips.
_BETWEEN_HOSTS = ("auto", "tcp", "rdma")
_IMPLYING_TRANSPORT = frozenset({"--use-dpp", "--forward-backward-disaggregating"})
# torchrun's default port, for dry runs, which do not contact a host to find a free port.
_DEFAULT_PORT = 29500
_LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0", "::")  # noqa: S104 - refused


def flag_value(flags: Sequence[str], name: str) -> str | None:
    """Return the last value of a flag on a command line, or None."""
    # Parse only this flag, because only Megatron's parser can handle all flags, and it runs
    # elsewhere.
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    # With `nargs="?"`, a missing value is not an error here; Megatron's parser reports
    # it.
    parser.add_argument(name, dest="value", nargs="?")
    namespace, _ = parser.parse_known_args(flags)
    value: str | None = namespace.value
    return value


# Sizes that the launcher needs, named after Megatron's arguments.
_SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "micro_batch_size",
)  # fmt: skip


def _sizes_of(flags: Sequence[str]) -> JobSizes:
    settings: dict[str, object] = {}
    for dest in _SIZES:
        flag = "--" + dest.replace("_", "-")
        text = flag_value(flags, flag)
        if text:
            is_number = text.isascii() and text.isdigit()
            # Pass non-numeric text through; `JobSizes` raises an error that names the flag.
            settings[dest] = int(text) if is_number else text
    try:
        return JobSizes.of(settings)
    except ArgumentsError as error:
        raise LaunchError(str(error)) from error


@dataclass(frozen=True)
class Parallel:
    """The parallel sizes in the training flags."""

    tensor: int
    pipeline: int
    context: int
    forward: int
    """Ranks per stage that run only forward passes, with `--forward-backward-disaggregating`."""
    replica_size: int
    """Number of ranks that hold one replica of the model."""
    smallest_job: int
    """Smallest number of ranks whose replicas together hold all experts."""

    @classmethod
    def of(cls, flags: Sequence[str]) -> Parallel:
        """Read the sizes from training flags."""
        sizes = _sizes_of(flags)
        tensor = sizes.tensor_model_parallel_size
        pipeline = sizes.pipeline_model_parallel_size
        context = sizes.context_parallel_size
        forward = 0
        if "--forward-backward-disaggregating" in flags:
            forward = tensor * context
            if "--ignore-forward-tensor-parallel" in flags:
                forward = context  # one rank instead of each tensor-parallel group
        stages = pipeline
        schedule = flag_value(flags, "--pipeline-schedule")
        is_mirrored = schedule in ("bitpipe", "dualpipe")
        if is_mirrored or "--enable-bitpipe-schedule" in flags:
            stages = -(-pipeline // 2)  # two mirrored pipelines
        shards = sizes.expert_tensor_parallel_size or tensor
        experts = shards * sizes.expert_model_parallel_size * stages
        dense = tensor * context * pipeline
        replica = dense + forward * pipeline
        # Expert parallelism spans replicas, so the number of ranks must be a common multiple of
        # both sizes.
        common_multiple = math.lcm(dense, experts)
        smallest = replica * common_multiple // dense
        return cls(
            tensor,
            pipeline,
            context,
            forward,
            replica_size=replica,
            smallest_job=smallest,
        )

    def data_parallel(self, world_size: int) -> int:
        """Return the number of model replicas that this many ranks form.

        Raises:
            LaunchError: The ranks do not divide evenly into replicas.
        """
        if world_size % self.replica_size:
            raise LaunchError(
                f"{world_size} ranks cannot be divided into replicas of {self.replica_size} (TP "
                f"{self.tensor} x PP {self.pipeline} x CP {self.context}); change the hosts, "
                f"--nproc, or the parallel sizes"
            )
        return world_size // self.replica_size


@dataclass(frozen=True)
class JobPlan:
    """A job before it starts."""

    run_id: str
    hosts: tuple[Host, ...]
    """The hosts. Their `slots` are the process counts; None means that the host has yet to count
    its devices."""
    command: tuple[str, ...]
    """The script and its flags or, with `per_node`, any command."""
    workdir: str
    python: str
    env: Mapping[str, str] = field(default_factory=dict)
    master_port: int | None = None
    """None: a free port, chosen on the first host."""
    num_microbatches: int | None = None
    """None: the flags set the batch size."""
    reserve: int | None = None
    """Number of reserve ranks on the last training host, if the job continues after losing a rank;
    None: the job stops."""
    num_reserve_hosts: int = 0
    """Number of hosts, at the end of the list, that only run reserve ranks."""
    local_checkpoints_of: str | None = None
    """The run of an earlier attempt, in whose folder of local checkpoints this attempt continues;
    None: this run's folder."""
    allow_uneven: bool = False
    per_node: bool = False
    """Run the command once on each host, without torchrun."""
    log_root: str | None = None
    grace_s: float = 5.0
    """Grace period in seconds. After a failure, a job stops within about twice this time, because
    the ranks on the same host are stopped first, then those on other hosts."""
    silence_s: float = 60.0
    """Seconds without messages after which the launcher and an agent consider each other lost."""
    ssh: tuple[str, ...] = ("ssh",)
    """The ssh program, with the user's options (`--ssh-cmd`)."""
    slurm_job: str | None = None
    """The Slurm job whose allocation this job runs in. srun then replaces ssh."""

    @property
    def training_hosts(self) -> tuple[Host, ...]:
        """The hosts that run training ranks."""
        return self.hosts[: len(self.hosts) - self.num_reserve_hosts]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(host.slots or 0 for host in self.training_hosts)

    @property
    def num_started(self) -> int:
        """Number of ranks, including reserve ranks."""
        return self.first_rank(len(self.hosts))

    @property
    def num_in_reserve(self) -> int:
        """Number of reserve ranks on all hosts."""
        return self.num_started - self.world_size

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags from the environment, then the command's flags, which take precedence."""
        return (*requested_flags(self.env), *self.command[1:])

    def first_rank(self, index: int) -> int:
        """Return the global rank of a host's first process."""
        return sum(self._num_ranks_by_host()[:index])

    def _num_ranks_by_host(self) -> list[int]:
        """Return the number of processes on each host, including reserve ranks."""
        counts = [host.slots or 0 for host in self.hosts]
        # nvidia-resiliency-ext expects the reserve ranks to come after all training
        # ranks.
        counts[len(self.training_hosts) - 1] += self.reserve or 0
        return counts

    def check(self) -> None:
        """Reject hosts that have different numbers of processes or cannot reach each other.

        Raises:
            LaunchError: Names the hosts and the remedy.
        """
        if self.per_node or len(self.hosts) == 1:
            return
        known_slots = {host.slots for host in self.hosts if host.slots}
        if len(known_slots) > 1 and not self.allow_uneven:
            shown = ", ".join(f"{host.name} {host.slots or 0}" for host in self.hosts)
            raise LaunchError(
                f"the hosts have different numbers of processes ({shown}); give them equal slots, "
                f"or use --nproc N or --allow-uneven"
            )
        for host in self.hosts:
            if host.address in _LOOPBACK:
                raise LaunchError(
                    f"{host.name}: the other hosts cannot reach it by this name; set its "
                    f"address with addr=IP in the hostfile"
                )

    def completed(self, devices: Sequence[int] | None = None) -> JobPlan:
        """Return the plan with all process counts and the flags that follow from the hosts.

        These flags are `--global-batch-size` if the user set the number of micro-batches,
        `--node-ips` if the script requests a transport that needs addresses, and the flags for
        in-process restarts. `devices` contains the counts reported by the hosts, or is None if
        every host has slots.
        """
        hosts = []
        counts = devices or [0] * len(self.hosts)
        # Slots set by the user take precedence over the number of devices.
        for host, count in zip(self.hosts, counts, strict=True):
            if not host.slots and not count:
                raise LaunchError(
                    f"{host.name}: no devices were found there; set the number of processes "
                    f"with slots=N in the hostfile or --nproc N"
                )
            hosts.append(replace(host, slots=host.slots or count))
        plan = replace(self, hosts=tuple(hosts))
        plan.check()
        if plan.per_node:
            return plan
        flags = [
            *plan._batch_flag(),
            *plan._address_flag(),
            *plan._restart_flags(),
        ]
        return replace(plan, command=(*plan.command, *flags))

    def _batch_flag(self) -> list[str]:
        """Return `--global-batch-size` if the user set the number of micro-batches."""
        # Even if the flags set the batch size, this rejects ranks that cannot be
        # divided into replicas.
        num_replicas = Parallel.of(self.flags).data_parallel(self.world_size)
        if self.num_microbatches is None:
            return []
        if flag_value(self.flags, "--global-batch-size") is not None:
            raise LaunchError(
                "--num-microbatches and --global-batch-size are both set, but one determines "
                "the other; remove one"
            )
        micro_batch_size = _sizes_of(self.flags).micro_batch_size
        if micro_batch_size is None:
            micro_batch_size = 1
        if micro_batch_size == 0:
            raise LaunchError("--micro-batch-size is 0; set it to at least 1")
        global_batch_size = self.num_microbatches * micro_batch_size * num_replicas
        return ["--global-batch-size", str(global_batch_size)]

    def _address_flag(self) -> list[str]:
        """Return `--node-ips` if the transport needs addresses and the user gave none."""
        wire = flag_value(self.flags, "--pipeline-transport")
        if wire is None and not _IMPLYING_TRANSPORT.isdisjoint(self.flags):
            wire = "auto"  # the default of `PipelineConfig.wire`
        has_addresses = flag_value(self.flags, "--node-ips") is not None
        needs_addresses = wire in _BETWEEN_HOSTS and len(self.hosts) != 1
        if has_addresses or not needs_addresses:
            return []
        if self.reserve is not None:
            # Ranks may be renumbered across hosts, so each keeper gives its ranks their address.
            return []
        # Use one address per host, or one per rank if the hosts have different numbers
        # of ranks.
        slot_counts = {host.slots for host in self.hosts}
        is_even = len(slot_counts) == 1
        addresses = []
        for host in self.hosts:
            address = host.rdma[0] if host.rdma else host.address
            num_entries = 1
            if not is_even:
                num_entries = host.slots or 0
            addresses += [address] * num_entries
        return ["--node-ips", *addresses]

    def _restart_flags(self) -> list[str]:
        """Return the flags that in-process restarts need, except those that the user has set."""
        if self.reserve is None:
            return []
        restart_flags = {
            "--inprocess-active-world-size": str(self.world_size),
            "--inprocess-granularity": "rank",
            # Seconds between checks. A restart waits for both, so they are short: with the
            # watchdog's default of 1 s, a recovery took 2.2 s instead of 1.2 s.
            "--inprocess-monitor-process-interval": "0.2",
            "--inprocess-progress-watchdog-interval": "0.2",
            "--inprocess-last-call-wait": "0.1",
        }
        restart_flags |= self._hang_timeouts()
        if len(self.hosts) > 1:
            # If a host dies, no process reports that its ranks are lost. The other
            # hosts only notice missing heartbeats.
            restart_flags |= {
                "--inprocess-heartbeat-interval": "2",
                "--inprocess-heartbeat-timeout": "20",
            }
        flags = []
        if "--inprocess-restart" not in self.flags:
            flags.append("--inprocess-restart")
        # Save a local checkpoint at every step, so that a restart repeats at most one
        # step.
        if flag_value(self.flags, "--non-persistent-ckpt-type") is None:
            root = self.log_root or runs_root()
            run_id = self.local_checkpoints_of or self.run_id
            restart_flags |= {
                "--non-persistent-ckpt-type": "local",
                "--non-persistent-save-interval": "1",
                "--non-persistent-local-ckpt-dir": f"{root}/{run_id}/local",
            }
            if len(self.hosts) > 1:
                restart_flags |= self._replication_flags()
                flags.append("--replication")
        for flag, value in restart_flags.items():
            if flag_value(self.flags, flag) is None:
                flags += [flag, value]
        return flags

    def _replication_flags(self) -> dict[str, str]:
        """Return the flags that make each rank also save tensors for ranks on other hosts.

        Raises:
            LaunchError: Megatron cannot form the groups of ranks that save for each other.
        """
        num_hosts = len(self.training_hosts)
        counts = {host.slots or 0 for host in self.training_hosts}
        if num_hosts == 1:
            # All training ranks are on one host, so they save tensors for each other.
            distance = 1
            num_copies = 2
        else:
            # Ranks with the same local rank save tensors for each other, in groups of hosts. All
            # groups have the same size, which is as small as possible, because each rank saves for
            # its whole group.
            distance = max(counts)
            num_copies = 2
            while num_hosts % num_copies:
                num_copies += 1
        num_group_ranks = distance * num_copies
        if len(counts) > 1 or self.world_size % num_group_ranks:
            raise LaunchError(
                f"--keep-going saves each rank's tensors twice, which requires the same number of "
                f"processes on every training host, but there are {self.world_size} on "
                f"{num_hosts}; set equal slots, or use --non-persistent-ckpt-type global"
            )
        return {
            "--replication-jump": str(distance),
            "--replication-factor": str(num_copies),
        }

    def _hang_timeouts(self) -> dict[str, str]:
        """Return NVRx's time-outs for a rank that makes no progress, from `--hang-timeout`."""
        text = flag_value(self.flags, "--hang-timeout")
        if text is None:
            return {}
        try:
            hang_s = float(text)
        except ValueError:
            raise LaunchError(
                f"--hang-timeout is {text!r}; it must be a number of seconds"
            ) from None
        # The hard time-out kills the rank, which is then lost. The barrier, where the other ranks
        # wait for that rank, must have a longer time-out.
        hard_s = 1.5 * hang_s
        barrier_s = max(120.0, 2 * hang_s)  # Megatron's default is 120 s
        return {
            "--inprocess-soft-timeout": f"{hang_s:g}",
            "--inprocess-hard-timeout": f"{hard_s:g}",
            "--inprocess-barrier-timeout": f"{barrier_s:g}",
        }

    def log_folder(self, index: int) -> str:
        """Return a host's log folder for this run, assuming the same home folder on all hosts."""
        host = self.hosts[index]
        root = self.log_root or runs_root()
        # The agent names its folder the same way (`agent.main`).
        name = re.sub(r"[^A-Za-z0-9._-]", "_", host.name)
        return f"{root}/{self.run_id}/{host.number:03d}-{name}"

    def host_of(self, rank: int) -> int:
        """Return the index of a global rank's host.

        Raises:
            LaunchError: The job has no such rank.
        """
        for index in range(len(self.hosts)):
            first_rank = self.first_rank(index)
            end_rank = self.first_rank(index + 1)
            if first_rank <= rank < end_rank:
                return index
        raise LaunchError(
            f"rank {rank}: the job has no such rank; use 0 to {self.num_started - 1}"
        )

    def environment(self, index: int) -> dict[str, str]:
        """Return variables for processes on a host, in addition to those from the login shell."""
        return {**self.env, **dict(self.hosts[index].env)}

    def _torchrun_words(self, index: int, port: int, *options: str) -> list[str]:
        # With several hosts, all of them must be able to resolve the address. A single host uses
        # the loopback address.
        num_hosts = len(self.hosts)
        master = "127.0.0.1" if num_hosts == 1 else self.hosts[0].address
        num_ranks = self._num_ranks_by_host()[index]
        flags = {
            "--nnodes": str(num_hosts),
            "--node-rank": str(index),
            "--nproc-per-node": str(num_ranks),
            "--master-addr": master,
            "--master-port": str(port),
            # Restarts are left to the launcher, because torchrun cannot use spare hosts
            # that are not running an agent.
            "--max-restarts": "0",
        }
        words = []
        for flag, value in flags.items():
            words += [flag, value]
        return [*words, *options, "-m", "megatron_ext", *self.command]

    def agent_argv(
        self,
        index: int,
        hello: Json,
        port: int,
        show: Sequence[int],
    ) -> list[str]:
        """Return the command that a host's agent starts; `hello` is the agent's answer.

        The ranks meet at a port on the first host. `show` lists the local ranks whose output is
        shown.
        """
        if self.per_node:
            return list(self.command)
        logs = hello["log_dir"]
        options = []
        # By default, torchrun resolves the host's name, perhaps to an address that
        # other hosts cannot reach.
        if "address" in hello:
            options += ["--local-addr", hello["address"]]
        options += [
            "--rdzv-id",
            self.run_id,
            "--log-dir",
            f"{logs}/ranks",
            "--redirects",
            "3",
        ]
        if show:
            # torchrun writes files for all ranks and forwards the output of the listed
            # ranks; 3 means both streams.
            streams = ",".join(f"{rank}:3" for rank in show)
            options += ["--tee", streams]
        report = [f"{logs}/failure.json", f"{self.grace_s:g}"]
        starter = [self.python, "-m", "megatron_ext.tools.launch.elastic", *report]
        if self.reserve is not None:
            starter = self._keeper_words(*report)
            # The keeper passes this address to its ranks. argparse uses the last
            # `--local-addr`.
            rdma_addresses = self.hosts[index].rdma
            if rdma_addresses:
                options += ["--local-addr", rdma_addresses[0]]
        torchrun_words = self._torchrun_words(index, port, *options)
        return [*starter, *torchrun_words]

    def _keeper_words(self, report: str, grace_s: str) -> list[str]:
        counts = ",".join(str(count) for count in self._num_ranks_by_host())
        keeper = [self.python, "-m", "megatron_ext.tools.launch.keeper"]
        return [*keeper, report, grace_s, str(self.num_in_reserve), counts]

    def request(self, index: int, op: str = "run") -> Json:
        """Return the first message to a host's agent, with the host's part of this plan."""
        host = self.hosts[index]
        is_first = index == 0
        peer = None
        if len(self.hosts) > 1 and not self.per_node:
            # The agent determines its own address from the route to any other host.
            other_host = self.hosts[1] if is_first else self.hosts[0]
            peer = other_host.address
        shared = replace(
            self,
            hosts=(),
            # Send only the script, which the agent checks. The whole command follows when
            # the job starts.
            command=self.command[:1],
            env=self.environment(index),
        )
        of_host = {
            "op": op,
            "node": host.number,
            "host": host.name,
            "nproc": host.slots or 0,
            "peer": peer,
            "is_first": is_first,
        }
        return asdict(shared) | of_host

    def record(self) -> Json:
        """Return the data that `stop`, `status` and `logs` need, as JSON."""
        # The record is stored on disk, so omit variables whose values may be secrets.
        hosts = tuple(replace(host, env=()) for host in self.hosts)
        return asdict(replace(self, env={}, hosts=hosts))

    @classmethod
    def of_record(cls, fields: Json) -> JobPlan:
        """Return the plan from a record.

        Raises:
            KeyError, TypeError, ValueError: Another version wrote the record, or it is damaged.
        """
        hosts = tuple(Host(**host_fields) for host_fields in fields["hosts"])
        for host in hosts:
            if host.name.startswith("-"):
                raise ValueError(f"ssh would parse the host {host.name} as an option")
        ssh = tuple(fields["ssh"])
        restored = {**fields, "hosts": hosts, "ssh": ssh}
        return cls(**restored)

    def flags_to_reach(self) -> list[str]:
        """Return the flags that `stop`, `status` and `logs` need to reach this plan's hosts."""
        is_all_local = all(host.local for host in self.hosts)
        if is_all_local or self.slurm_job is not None:
            return []
        flags = []
        if self.ssh != ("ssh",):
            flags += ["--ssh-cmd", shlex.join(self.ssh)]
        if self.python != sys.executable:
            flags += ["--python", self.python]
        return flags

    def dry_run(self) -> str:
        """Return the command for each host, which users can run by hand without ssh.

        The command reads possible secrets from the shell that runs it.
        """
        parts = []
        for index, host in enumerate(self.hosts):
            words = list(self.command)
            if not self.per_node:
                words = self._starter_by_hand(index)
            environment = self.environment(index)
            line_words = [f"cd {_quoted(self.workdir)} &&"]
            for name in sorted(environment):
                assignment = _assignment(name, environment[name])
                line_words.append(assignment)
            line_words += map(_quoted, words)
            line = " ".join(line_words)
            parts.append(f"# {host.name}\n{line}\n")
        return "\n".join(parts)

    def _starter_by_hand(self, index: int) -> list[str]:
        """Return the command that starts a host's ranks without an agent."""
        port = self.master_port or _DEFAULT_PORT
        if self.reserve is None:
            torchrun = [self.python, "-m", "torch.distributed.run"]
            return torchrun + self._torchrun_words(index, port)
        folder = self.log_folder(index)
        keeper = self._keeper_words(f"{folder}/failure.json", f"{self.grace_s:g}")
        options = ["--rdzv-id", self.run_id, "--log-dir", f"{folder}/ranks"]
        if len(self.hosts) > 1:
            options += ["--local-addr", self.hosts[index].address]
        return keeper + self._torchrun_words(index, port, *options)

    def summary(self) -> str:
        """Return one line that shows the hosts, the ranks, the parallel sizes and the batch."""
        hosts = f"{len(self.hosts)} host"
        if len(self.hosts) > 1:
            hosts += "s"
        if self.per_node:
            return f"{hosts}, one command on each"
        sizes = Parallel.of(self.flags)
        batch = flag_value(self.flags, "--global-batch-size")
        reserve = ""
        if self.reserve is not None:
            reserve = f" and {self.num_in_reserve} in reserve"
        line = (
            f"{hosts}, {self.world_size} ranks{reserve}: TP {sizes.tensor}, PP {sizes.pipeline}, "
            f"CP {sizes.context}, DP {sizes.data_parallel(self.world_size)}"
        )
        if sizes.forward:
            line += ", separate forward and backward ranks"
        if batch is not None:
            line += f"; {batch} samples per step"
        return line


def _assignment(name: str, value: str) -> str:
    """Return a bash variable assignment, without the value if it may be a secret."""
    # Any user variable may be a password. A library's variable is treated as one only
    # if its name suggests it.
    if name.startswith(FORWARDED) and not _SECRET.search(name):
        return f"{name}={_quoted(value)}"
    # ${NAME?} makes bash stop with an error that names the variable if it is not set.
    return f'{name}="${{{name}?}}"'


def _quoted(word: str) -> str:
    """Return a word quoted for bash, with visible escapes for control characters."""
    if word.isprintable():
        return shlex.quote(word)
    # Escape individual bytes, because they need not form valid text and bash accepts
    # such escapes in every locale.
    bytes_as_text = os.fsencode(word).decode("latin-1")
    escaped = bytes_as_text.encode("unicode_escape").decode()
    escaped = escaped.replace("'", r"\'")
    return f"$'{escaped}'"
