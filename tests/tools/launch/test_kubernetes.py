"""Manifests for Kubeflow, held against the schemas that its Python packages publish."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.tools.doctor.machine import Sizes, arena_bytes
from tests.commands import run_package

GIB, MIB = 1 << 30, 1 << 20
FLAGS = (
    "--num-layers 32 --seq-length 8192 --micro-batch-size 1 --hidden-size 4096 --bf16 "
    "--pipeline-model-parallel-size 8 --use-dpp --num-attention-heads 32"
).split()
OPTIONS = (
    "--image registry.example/me/image:1 --nodes 2 --nproc 8 --num-microbatches 32 "
    "--gpu-resource nvidia.com/gpu --rdma-resource rdma/hca --run-id llama --env A=1"
).split()


def printed(kind: str, options: list[str] = OPTIONS, flags: list[str] = FLAGS) -> dict[str, Any]:
    done = run_package(
        "launch", "--kubernetes", kind, "--dry-run", *options, "--", "pretrain_gpt.py", *flags
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def published(manifest: dict[str, Any]) -> dict[str, Any]:
    """What the published schema makes of a manifest; unknown fields are lost, wrong ones raise."""
    if manifest["kind"] == "TrainJob":
        api = pytest.importorskip("kubeflow_trainer_api.models")
        return dict(api.TrainerV1alpha1TrainJob.from_dict(manifest).to_dict())
    training = pytest.importorskip("kubeflow.training")
    client = training.ApiClient()
    answer = SimpleNamespace(data=json.dumps(manifest))
    job = client.deserialize(answer, training.KubeflowOrgV1PyTorchJob)
    return dict(client.sanitize_for_serialization(job))


@pytest.mark.parametrize("kind", ["trainjob", "pytorchjob"])
def test_the_manifest_is_what_the_published_schema_says(kind: str) -> None:
    manifest = printed(kind)
    assert published(manifest) == manifest


def test_a_field_that_the_schema_has_not_is_found() -> None:
    for kind in ("trainjob", "pytorchjob"):
        manifest = printed(kind)
        manifest["spec"]["shmSize"] = "1Gi"
        assert published(manifest) != manifest
    manifest = printed("trainjob")
    manifest["spec"]["trainer"]["numNodes"] = "two"
    with pytest.raises(ValueError, match=r"num_nodes|numNodes"):
        published(manifest)


def test_memory_and_devices_follow_from_the_schedule() -> None:
    spec = printed("trainjob")["spec"]
    trainer = spec["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    arenas = arena_bytes(Sizes("1f1b", 8, 32, 8192, 1, 4096))
    assert arenas > 0
    memory = -(-8 * (GIB + arenas) // MIB)
    assert trainer["resourcesPerNode"] == {
        "requests": {"memory": f"{memory}Mi", "nvidia.com/gpu": "8", "rdma/hca": "1"},
        "limits": {"nvidia.com/gpu": "8", "rdma/hca": "1"},
    }
    [job] = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    assert pod["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert pod["containers"][0]["volumeMounts"][0]["mountPath"] == "/dev/shm"
    assert pod["containers"][0]["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    *shell, script = trainer["command"]
    assert shell == ["bash", "-c"]
    assert script.startswith("megatron-ext doctor && exec torchrun -m megatron_ext pretrain_gpt.py")
    assert script.endswith("--global-batch-size 64")  # 32 micro-batches of 1 on 2 replicas


def test_on_cpus_nothing_is_asked_for_that_is_not_there() -> None:
    manifest = printed("pytorchjob", ["--image", "i", "--nproc", "2"], ["--num-layers", "4"])
    specs = manifest["spec"]["pytorchReplicaSpecs"]
    assert list(specs) == ["Master"]
    container = specs["Master"]["template"]["spec"]["containers"][0]
    assert container["resources"] == {"requests": {"memory": "2048Mi"}}
    assert "securityContext" not in container


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--image i --nproc 2", "--kubernetes prints a manifest and starts nothing; add --dry-run"),
        ("--dry-run --nproc 2", "--kubernetes needs --image IMAGE and --nproc N"),
        ("--dry-run --image i --nproc 2 --run-id A_b", "--run-id 'A_b' is no name for Kubernetes"),
        (
            "--dry-run --image i --nproc 3",
            "3 ranks cannot be divided into replicas of 2 (TP 1 x PP 2",
        ),
        (
            "--dry-run --image i --nproc 2 --slurm x",
            "--kubernetes goes without --hostfile, --slurm",
        ),
    ],
)
def test_what_cannot_be_is_one_line(options: str, message: str) -> None:
    done = run_package(
        "launch", "--kubernetes", "trainjob", *options.split(), "--", "pretrain_gpt.py",
        "--pipeline-model-parallel-size", "2",
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith(f"megatron-ext: error: {message}"), done.stderr
    assert done.stderr.count("\n") == 1
