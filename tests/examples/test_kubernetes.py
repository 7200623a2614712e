"""The manifest for Kubernetes: what Kubeflow's schema says, and sizes that fit each other."""

from __future__ import annotations

import copy
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.schedules import generate
from megatron_ext.tools.launch.plan import Parallel, flag_value

yaml = pytest.importorskip("yaml")
MANIFEST = Path(__file__).parents[2] / "examples" / "kubernetes" / "trainjob.yaml"


def manifest() -> dict[str, Any]:
    return copy.deepcopy(dict(yaml.safe_load(MANIFEST.read_text())))


def published(found: dict[str, Any]) -> dict[str, Any]:
    """Return what the schema keeps of a manifest: unknown fields are lost, wrong ones raise."""
    api = pytest.importorskip("kubeflow_trainer_api.models")
    return dict(api.TrainerV1alpha1TrainJob.from_dict(found).to_dict())


def test_the_manifest_is_what_the_published_schema_says() -> None:
    assert published(manifest()) == manifest()
    wrong = manifest()
    wrong["spec"]["shmSize"] = "1Gi"
    assert published(wrong) != wrong
    wrong = manifest()
    wrong["spec"]["trainer"]["numNodes"] = "two"
    with pytest.raises(ValueError, match=r"num_nodes|numNodes"):
        published(wrong)


def test_sizes_fit_the_pods() -> None:
    trainer = manifest()["spec"]["trainer"]
    *shell, script = trainer["command"]
    assert shell == ["bash", "-c"]
    check, _, start = script.partition(" && exec ")
    assert check == "megatron-ext doctor"
    words = shlex.split(start)
    assert words[:4] == ["torchrun", "-m", "megatron_ext", "pretrain_gpt.py"]
    nproc = trainer["numProcPerNode"]
    replicas = Parallel.of(words).data_parallel(trainer["numNodes"] * nproc)
    name, batch = (
        flag_value(words, "--pipeline-schedule"),
        flag_value(words, "--global-batch-size"),
    )
    assert name is not None
    assert batch is not None
    assert (
        generate(name, Parallel.of(words).pipeline, int(batch) // replicas).num_stages
        == 16
    )
    resources = trainer["resourcesPerNode"]
    assert resources["limits"]["nvidia.com/gpu"] == str(nproc)
    [patch] = manifest()["spec"]["runtimePatches"]
    [job] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    volume = job["template"]["spec"]["template"]["spec"]["volumes"][0]
    assert volume["emptyDir"]["sizeLimit"] == f"{nproc}Gi"
