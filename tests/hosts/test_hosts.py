"""Hosts cost nothing where they are not, and say what they lack."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

import megatron_ext
from megatron_ext import PipelineConfig, hosts
from megatron_ext.config import active
from megatron_ext.config.flags import parse_words, requested_flags
from megatron_ext.config.incompatible import RULES, refusals
from megatron_ext.errors import ArgumentsError, UserError
from megatron_ext.hosts import bridge_requirements, bridge_weights
from megatron_ext.hosts.bridge import Settings
from megatron_ext.tools.doctor import checks
from megatron_ext.upstream import releases
from tests.commands import run_python
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

REPO = Path(__file__).parents[2]
PYTHON = os.environ.get("MEGATRON_BRIDGE_PYTHON", "")
HAS_BRIDGE = util.find_spec("megatron.bridge") is not None


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(HAS_BRIDGE, reason="tests/hosts/test_bridge.py runs here itself")
def test_bridge_in_the_environment_that_is_given() -> None:
    if not PYTHON:
        pytest.skip("MEGATRON_BRIDGE_PYTHON names no Python with megatron-bridge")
    done = subprocess.run(
        ["bash", "tests/hosts/run.sh", "-q", "-k", "test_bridge"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_nothing_of_a_host_is_imported_without_it() -> None:
    code = (
        "import sys, megatron_ext, megatron_ext.cli, megatron.core\n"
        "print(*sorted(m for m in sys.modules if m.startswith('megatron_ext.hosts.')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == []


OLD_BRIDGE = (
    "megatron-bridge 0.5.0 is installed, but >=0.6,<0.8 is supported; pip install "
    "'megatron-bridge>=0.6,<0.8'"
)

HOST = """
import sys, types
import megatron_ext
from megatron_ext.patches.registry import REGISTRY
assert not any(row.id.startswith("bridge.") for row in megatron_ext.report())
import megatron.bridge.training.config as config
states = {row.id: row.state for row in megatron_ext.report() if row.id.startswith("bridge.")}
assert states["bridge.validate"] == "installed" and states["bridge.train_step"] == "pending", states
config.ConfigContainer().validate()
patched = config.ConfigContainer.validate
megatron_ext.deactivate()
print(type(patched).__name__, type(config.ConfigContainer.__dict__["validate"]).__name__)
"""


def test_rows_come_just_before_the_host(tmp_path: Path) -> None:
    """A package of the name, with one of the functions, stands in for Bridge."""
    folder = tmp_path / "megatron" / "bridge" / "training"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").write_text("")
    (folder / "config.py").write_text(
        "class ConfigContainer:\n    def validate(self):\n        pass\n"
        "def megatron_mimo_runtime_config_update(cfg):\n    pass\n"
    )
    utils = folder.parent / "utils"
    utils.mkdir()
    (utils / "__init__.py").write_text("")
    (utils / "common_utils.py").write_text(
        "def get_rank_safe():\n    return 0\ndef get_world_size_safe():\n    return 1\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", HOST],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{REPO}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["BoundFunctionWrapper", "function"]


def _await() -> list[str]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    said: list[str] = []
    try:
        megatron_ext.configure(PipelineConfig(schedule="zb-h1"))
    except UserError as error:
        said.append(str(error))
    hosts.check_some_host = lambda: None
    megatron_ext.configure(PipelineConfig(schedule="zb-h1"))
    try:
        get_forward_backward_func()
    except UserError as error:
        said.append(str(error))
    megatron_ext.deconfigure()
    assert active.active() is None
    assert get_forward_backward_func(1, None).__module__.startswith("megatron.core")
    return said


def _not_read() -> list[str]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    sizes = {"pipeline_ranks": 4, "num_microbatches": 8, "num_layers": 8}
    said = []
    for begin in (
        get_forward_backward_func,
        lambda: megatron_ext.configure(PipelineConfig(schedule="zb-h1"), **sizes),
    ):
        with pytest.raises(UserError) as caught:
            begin()
        said.append(str(caught.value))
    return said


def test_a_program_that_configures_what_is_switched_off_is_told_so() -> None:
    code = "import megatron_ext; megatron_ext.configure(megatron_ext.PipelineConfig())"
    done = run_python("-c", code, MEGATRON_EXT_DISABLE="1")
    assert (
        "MEGATRON_EXT_DISABLE=1 disables everything that configure activates"
        in done.stderr
    )


def test_flags_in_the_environment_that_nobody_reads_are_refused() -> None:
    env = {"MEGATRON_EXT_FLAGS": "--pipeline-schedule zb-v"}
    [(unread, beside)] = run_ranks(1, _not_read, env=env)
    assert "MEGATRON_EXT_FLAGS is set, but only programs with" in unread
    assert "configure was called, but MEGATRON_EXT_FLAGS is also set" in beside


@pytest.mark.skipif(HAS_BRIDGE, reason="there is a host here")
def test_a_configuration_without_sizes_needs_a_host() -> None:
    [[nobody, too_late]] = run_ranks(1, _await)
    assert (
        "pass pipeline_ranks, num_microbatches and num_layers, or pip install" in nobody
    )
    assert "no host has supplied them before the first step" in too_late


def _installed(
    monkeypatch: pytest.MonkeyPatch, version: str, core: str, *missing: str
) -> None:
    def find_spec(name: str) -> Any:
        return None if name in missing else object()

    monkeypatch.setattr(metadata, "version", lambda name: version)
    monkeypatch.setattr(releases, "core_version", lambda: core)
    monkeypatch.setattr(bridge_requirements, "find_spec", find_spec)


def test_a_bridge_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, "0.6.2", "0.18.2", "transformer_engine", "modelopt")
    monkeypatch.setattr(bridge_requirements.sys, "version_info", (3, 11, 7))
    for module in ("transformer_engine", "modelopt"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    core, python, imports = bridge_requirements.problems()
    assert core.endswith("0.18.2 is installed; pip install 'megatron-core>=0.19,<0.20'")
    assert python.endswith(
        "needs Python 3.12, but this is 3.11; create an environment with Python 3.12"
    )
    assert imports.startswith(
        "megatron-bridge 0.6.2 always imports transformer_engine, modelopt"
    )
    assert imports.endswith(
        "; pip install 'transformer-engine[pytorch]' 'nvidia-modelopt'"
    )
    with pytest.raises(UserError, match="needs megatron-core"):
        bridge_requirements.check_installed()


def test_the_doctor_says_what_bridge_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, "0.5.0", "0.19.2")
    [line] = checks.check_bridge()
    assert str(line) == f"WARN megatron-bridge: {OLD_BRIDGE}"
    monkeypatch.setattr(checks, "installed", lambda _name: None)
    assert list(checks.check_bridge()) == []


def test_a_bridge_outside_of_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, "0.5.0", "0.19.2")
    assert list(bridge_requirements.problems()) == [OLD_BRIDGE]


@pytest.mark.parametrize(
    ("version", "core", "remedies"),
    [
        ("0.6.2", "0.19.2", []),
        ("0.7.0", "0.20.0", []),
        ("0.7.0", "0.19.2", ["pip install 'megatron-core>=0.20,<0.21'"]),
    ],
)
def test_the_core_that_a_bridge_needs(
    monkeypatch: pytest.MonkeyPatch, version: str, core: str, remedies: list[str]
) -> None:
    _installed(monkeypatch, version, core)
    monkeypatch.setattr(bridge_requirements.sys, "version_info", (3, 12, 1))
    assert [
        line.partition("; ")[2] for line in bridge_requirements.problems()
    ] == remedies


def test_flags_in_the_environment_are_split_as_by_a_shell() -> None:
    variables = {
        "MEGATRON_EXT_FLAGS": "--pipeline-schedule 'csv:a table.csv' --use-dpp"
    }
    words = requested_flags(variables)
    assert words == ("--pipeline-schedule", "csv:a table.csv", "--use-dpp")
    assert vars(parse_words(words, "here")) == {
        "pipeline_schedule": "csv:a table.csv",
        "use_dpp": True,
    }
    assert requested_flags({}) == ()
    with pytest.raises(
        ArgumentsError, match="No closing quotation; close the quotation"
    ):
        requested_flags({"MEGATRON_EXT_FLAGS": "--trace-dir 'x"})
    with pytest.raises(
        ArgumentsError, match="it may contain only flags of megatron_ext"
    ):
        parse_words(["--num-layers", "8"], "here")


@dataclass
class _Model:
    """The fields of Bridge's model configuration that have other names than Megatron's flags."""

    num_moe_experts: int | None = 8
    num_layers_in_first_pipeline_stage: int | None = 1
    num_layers_in_last_pipeline_stage: int | None = None
    virtual_pipeline_model_parallel_size: int | None = None
    moe_token_dispatcher_type: str = "flex"
    num_layers: int = 8
    pipeline_model_parallel_size: int = 4
    variable_seq_lengths: bool = False
    disable_parameter_transpose_cache: bool = False
    expert_model_parallel_size: int = 1
    overlap_moe_expert_parallel_comm: bool = False


def test_bridges_names_are_those_of_the_rules() -> None:
    settings = Settings(SimpleNamespace(model=_Model()))
    args = settings.arguments(world_size=4, rank=0)
    assert (args.num_experts, args.decoder_first_pipeline_num_layers) == (8, 1)
    [refusal] = refusals("schedule zb-v", args, RULES["placed"])
    assert "cannot run with --decoder-first-pipeline" in str(refusal)
    in_bridge = refusal.worded(settings.in_fields)
    assert (
        "cannot run with model.num_layers_in_first_pipeline_stage, model." in in_bridge
    )
    args.moe_token_dispatcher_type = "allgather"
    [refusal] = refusals("variable_seq_lengths", args, RULES["lengths"])
    assert refusal.reason.endswith("it gathers tokens in fixed-size buffers")
    settings.write({"num_experts": 4})
    assert settings.container.model.num_moe_experts == 4
    settings.restore()
    assert settings.container.model.num_moe_experts == 8


@pytest.mark.parametrize("more", [{"slices": 2}, {"variable_seq_lengths": True}])
def test_bridge_gets_the_settings_that_a_configuration_needs(
    more: dict[str, Any],
) -> None:
    model = _Model(num_moe_experts=None, num_layers_in_first_pipeline_stage=None)
    settings = Settings(SimpleNamespace(model=model))
    args = settings.arguments(world_size=4, rank=0)
    found = megatron_ext.preflight(args, PipelineConfig(schedule="zb-h1", **more))
    found.raise_refusals()
    settings.write(found.arguments)
    assert model.variable_seq_lengths == ("variable_seq_lengths" in more)
    assert model.disable_parameter_transpose_cache == ("slices" in more)


@pytest.mark.parametrize(
    "packing", ["enable_offline_packing", "enable_in_batch_packing"]
)
def test_packed_sequences_of_bridge_have_no_pairs(packing: str) -> None:
    """Its forward step gives plans of pairs no bounds, as Megatron's."""
    model = _Model(
        num_layers_in_first_pipeline_stage=None, expert_model_parallel_size=2
    )
    model.overlap_moe_expert_parallel_comm = True
    data = SimpleNamespace(**{packing: True})
    settings = Settings(SimpleNamespace(model=model, dataset=data))
    args = settings.arguments(world_size=8, rank=0)
    found = megatron_ext.preflight(args, PipelineConfig(schedule="zb-h1"))
    found.raise_refusals()
    assert found.arguments["overlap_moe_expert_parallel_comm"] is False
    assert any("with packed sequences" in line for line in found.changes)


@dataclass(frozen=True)
class _Task:
    """The fields of Bridge's conversion tasks that tell two copies of a weight apart."""

    vp_stage: int
    megatron_module: Any
    param_weight: Any


class _Streamed(NamedTuple):
    param_name: str
    weight: Any
    vp_stage: int


def _chunk(**modules: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.ModuleDict({"layers": torch.nn.Linear(2, 2), **modules})


@pytest.fixture
def folded_chunks() -> list[torch.nn.Module]:
    """Return chunks of a rank that holds the embedding in its first and its last chunk."""
    return [
        _chunk(embedding=torch.nn.Embedding(3, 2)),
        _chunk(),
        _chunk(embedding=torch.nn.Embedding(3, 2), output_layer=torch.nn.Linear(2, 3)),
    ]


def _tasks(chunks: list[torch.nn.Module], names: list[str]) -> list[_Task | None]:
    """Make tasks as Bridge does, of the last chunk that holds a name."""
    tasks: list[_Task | None] = []
    for name in names:
        for stage, chunk in enumerate(chunks):
            if name in chunk:
                task = _Task(stage, chunk[name], chunk[name].weight)
        tasks.append(task)
    return [*tasks, None]


def test_bridge_converts_the_first_copy_of_a_rank(folded_chunks: list[Any]) -> None:
    def build_conversion_tasks(
        hf_pretrained: Any, megatron_model: Any
    ) -> list[_Task | None]:
        return _tasks(megatron_model, ["embedding", "layers", "output_layer"])

    convert = bridge_weights._convert_first_copies
    embedding, layers, output, unknown = convert(
        build_conversion_tasks, None, (None, folded_chunks), {}
    )
    first, _, last = folded_chunks
    assert embedding.vp_stage == 0
    assert embedding.megatron_module is first["embedding"]
    assert embedding.param_weight is first["embedding"].weight
    # Layers have local numbers: those of two chunks are not two copies.
    assert layers.vp_stage == 2
    assert layers.param_weight is last["layers"].weight
    assert output.param_weight is last["output_layer"].weight
    assert unknown is None


def test_bridge_streams_weights_to_every_copy_of_a_rank(
    folded_chunks: list[Any],
) -> None:
    def stream_weights_hf_to_megatron(
        hf_pretrained: Any, megatron_model: Any, conversion_tasks: Any = None
    ) -> Iterator[_Streamed]:
        yield _Streamed("embedding.weight", 1, 0)
        yield _Streamed("layers.weight", 2, 0)

    streamed = bridge_weights._stream_to_all_copies(
        stream_weights_hf_to_megatron, None, (None, folded_chunks), {}
    )
    assert list(streamed) == [
        ("embedding.weight", 1, 0),
        ("embedding.weight", 1, 2),
        ("layers.weight", 2, 0),
    ]


def test_bridge_fills_later_copies_of_a_rank_from_the_first(
    folded_chunks: list[Any],
) -> None:
    def broadcast_shared_embeddings(megatron_model: Any) -> None:
        raise AssertionError("Bridge would fill them from another rank")

    first, _, last = folded_chunks
    loaded = first["embedding"].weight.clone()
    layers = last["layers"].weight.clone()
    bridge_weights._fill_copies(broadcast_shared_embeddings, None, (folded_chunks,), {})
    assert torch.equal(first["embedding"].weight, loaded)
    assert torch.equal(last["embedding"].weight, loaded)
    assert torch.equal(last["layers"].weight, layers)
