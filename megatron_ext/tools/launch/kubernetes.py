"""Kubernetes manifests for Kubeflow, whose operators start the pods and set the rendezvous.

Both kinds of job set torchrun's variables (PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, ...), so a
pod runs plain torchrun. Every pod runs `megatron-ext doctor` first; an unfit pod fails with its
findings. The functions are pure: nothing here talks to a cluster.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ext.errors import LaunchError
from megatron_ext.tools.launch.plan import Parallel, flag_value

__all__ = ["KINDS", "Pods", "manifest"]

KINDS = ("trainjob", "pytorchjob")
_GIB = 1 << 30
_SHARED_BYTES = _GIB
"""Size of /dev/shm for each process: NCCL and data loader workers use it."""
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class Pods:
    """The pods of a job: `nodes` pods with `nproc` processes each."""

    name: str
    image: str
    nodes: int
    nproc: int
    gpu_resource: str | None = None
    """The cluster's resource name of a device, such as `nvidia.com/gpu`; None: CPU only."""
    rdma_resource: str | None = None
    """The cluster's resource name of an RDMA device, such as `rdma/hca`; None: TCP between pods."""
    environment: tuple[tuple[str, str], ...] = ()
    embedded: bool = False

    def check(self, command: Sequence[str]) -> None:
        """Check the job's name, and the number of processes against the parallel sizes.

        Raises:
            LaunchError: The name is invalid, or the ranks do not fit the parallel sizes.
        """
        if not _NAME.fullmatch(self.name):
            raise LaunchError(
                f"--run-id {self.name!r} is no name for Kubernetes; small letters, digits and "
                f"dashes are, up to 63, with a letter first"
            )
        Parallel.of(command).data_parallel(self.nodes * self.nproc)


def manifest(kind: str, pods: Pods, command: Sequence[str]) -> dict[str, Any]:
    """Return the manifest of a job.

    Args:
        kind: `trainjob` (Kubeflow Trainer) or `pytorchjob` (the older Training Operator).
        pods: The pods of the job.
        command: The training script and its flags.

    Returns:
        The Kubernetes object, ready to be written as YAML or JSON.

    Raises:
        LaunchError: The name is invalid, or the ranks do not fit the parallel sizes.
    """
    pods.check(command)
    return {"trainjob": _train_job, "pytorchjob": _pytorch_job}[kind](pods, command)


def _train_job(pods: Pods, command: Sequence[str]) -> dict[str, Any]:
    container: dict[str, Any] = {"name": "node", "volumeMounts": [_MOUNT]}
    if pods.rdma_resource is not None:
        container["securityContext"] = _LOCKS_MEMORY
    pod = {"containers": [container], "volumes": [_volume(pods)]}
    patched = [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": pods.name},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": pods.image,
                "numNodes": pods.nodes,
                "numProcPerNode": pods.nproc,
                "command": _command(pods, command),
                "env": _environment(pods),
                "resourcesPerNode": _resources(pods, command),
            },
            "runtimePatches": [{
                "manager": "megatron-ext/launch",
                "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": patched}}},
            }],
        },
    }  # fmt: skip


def _pytorch_job(pods: Pods, command: Sequence[str]) -> dict[str, Any]:
    container = {
        "name": "pytorch",  # the operator looks for this name
        "image": pods.image,
        "command": _command(pods, command),
        "env": _environment(pods),
        "resources": _resources(pods, command),
        "volumeMounts": [_MOUNT],
    }
    if pods.rdma_resource is not None:
        container["securityContext"] = _LOCKS_MEMORY
    template = {"spec": {"containers": [container], "volumes": [_volume(pods)]}}

    def replicas(count: int) -> dict[str, Any]:
        return {"replicas": count, "restartPolicy": "Never", "template": template}

    specs = {"Master": replicas(1)}
    if pods.nodes > 1:
        specs["Worker"] = replicas(pods.nodes - 1)
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": pods.name},
        "spec": {
            "nprocPerNode": str(pods.nproc),
            "pytorchReplicaSpecs": specs,
            "runPolicy": {"cleanPodPolicy": "Running"},  # remove running pods after the job
        },
    }


_MOUNT = {"name": "shared-memory", "mountPath": "/dev/shm"}  # noqa: S108 - in the pod
_LOCKS_MEMORY = {"capabilities": {"add": ["IPC_LOCK"]}}


def _volume(pods: Pods) -> dict[str, Any]:
    size = f"{math.ceil(pods.nproc * _SHARED_BYTES / _GIB)}Gi"
    return {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": size}}


def _command(pods: Pods, command: Sequence[str]) -> list[str]:
    embedded = ["--embedded"] if pods.embedded else []
    start = shlex.join(["torchrun", "-m", "megatron_ext", *embedded, *command])
    return ["bash", "-c", f"{shlex.join(['megatron-ext', 'doctor'])} && exec {start}"]


def _environment(pods: Pods) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in pods.environment]


def _resources(pods: Pods, command: Sequence[str]) -> dict[str, Any]:
    devices = {}
    if pods.gpu_resource is not None:
        devices[pods.gpu_resource] = str(pods.nproc)
    if pods.rdma_resource is not None:
        devices[pods.rdma_resource] = "1"
    shared = pods.nproc * (_SHARED_BYTES + _arena_bytes(pods, command))
    memory = f"{math.ceil(shared / (1 << 20))}Mi"
    found: dict[str, Any] = {"requests": {"memory": memory, **devices}}
    return {**found, "limits": devices} if devices else found


def _arena_bytes(pods: Pods, command: Sequence[str]) -> int:
    """Return the maximum size in bytes of a rank's transport arenas; 0 if it has none."""
    from megatron_ext.tools.doctor.machine import Sizes, arena_bytes

    transport = flag_value(command, "--pipeline-transport")
    names = ("--seq-length", "--micro-batch-size", "--hidden-size")
    given = [flag_value(command, name) for name in names]
    native = transport not in (None, "torch") or "--use-dpp" in command
    parallel = Parallel.of(command)
    if not native or parallel.pipeline == 1 or not all(v and v.isdecimal() for v in given):
        return 0
    seq_length, micro_batch_size, hidden_size = (int(value or 0) for value in given)
    schedule = flag_value(command, "--pipeline-schedule") or (
        "bitpipe" if "--enable-bitpipe-schedule" in command else "1f1b"
    )
    batch = flag_value(command, "--global-batch-size")
    num_microbatches = 4 * parallel.pipeline
    if batch is not None and batch.isdecimal():
        replicas = parallel.data_parallel(pods.nodes * pods.nproc)
        num_microbatches = max(1, int(batch) // (micro_batch_size * replicas))
    half = {"--bf16", "--fp16"} & set(command)
    return arena_bytes(Sizes(
        schedule, parallel.pipeline, num_microbatches, seq_length, micro_batch_size, hidden_size,
        bytes_per_value=2 if half else 4,
    ))  # fmt: skip
