"""`megatron-ext plan --devices`: finds the best layout for a model and a bound on its speed."""

# ruff: noqa: T201 - commands report on stdout and stderr

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.config.incompatible import RULES
from megatron_ext.errors import ArgumentsError
from megatron_ext.files import cannot_write, write_text
from megatron_ext.planning.hardware import DEVICES, DeviceKind, parse_devices
from megatron_ext.planning.layer_costs import mode_name, recompute_modes
from megatron_ext.planning.layout_forecast import Layout, timeline_of
from megatron_ext.planning.layout_search import MEGATRONS, SearchResult, fits, search
from megatron_ext.planning.model_source import read_model
from megatron_ext.planning.question import FIXABLE, Question, fixed_text
from megatron_ext.planning.techniques import PRECISIONS, Techniques, techniques_of_flags
from megatron_ext.schedules.drawing import svg
from megatron_ext.schedules.generators.catalog import get
from megatron_ext.schedules.table.cuts import parse_layout
from megatron_ext.tools import calibrate
from megatron_ext.tools.plan_text import (
    UNLIMITED_GIB,
    explanation_lines,
    result_as_dict,
    result_lines,
)
from megatron_ext.tools.schedule_commands import refuse_others

if TYPE_CHECKING:
    from megatron_ext.planning.model_sizes import ModelSizes

_FLAGS = (
    *(
        "model",
        "size",
        "devices",
        "global_batch_size",
        "seq_length",
        "fix",
        "precision",
    ),
    *("picture", "cross_entropy_loss_fusion", "no_overlap", "explain"),
)
_LAYOUT_FLAGS = {
    *(
        "--tensor-model-parallel-size",
        "--pipeline-model-parallel-size",
        "--context-parallel-size",
    ),
    *(
        "--expert-model-parallel-size",
        "--micro-batch-size",
        "--pipeline-model-parallel-layout",
    ),
    *(
        "--num-layers-per-virtual-pipeline-stage",
        "--num-virtual-stages-per-pipeline-rank",
    ),
    *("--pipeline-schedule", "--enable-bitpipe-schedule", "--pipeline-layout"),
    *("--recompute-granularity", "--recompute-modules"),
}
"""Flags that do not describe the model, because the planner itself chooses their values."""
_RECIPE_MODULES = frozenset({"core_attn", "mlp", "shared_experts"})
"""Modules that recipes with experts recompute but the search does not try to recompute."""
_MAX_DOUBLINGS = 6
_MAX_COUNT = 10**9
"""Maximum number of sequences per step and of tokens per sequence."""


def add_to_plan(subparsers: Any) -> None:
    """Add the layout search to the existing `plan` subcommand."""
    parser = subparsers.choices["plan"]
    group = parser.add_argument_group(
        "a layout for a model",
        "sizes, cut, schedule and recomputation, with a lower bound on the step time",
    )
    group.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="a folder with model.env, such as examples/deepseek-v3, or a Hugging Face config.json",
    )
    group.add_argument(
        "--size",
        metavar="NAME",
        help="size of an example model (default: the example's default)",
    )
    group.add_argument(
        "--devices",
        metavar="NxKIND",
        help=f"number and kind of devices: {', '.join(DEVICES)}, or a device file (64xmine.json)",
    )
    group.add_argument(
        "--global-batch-size",
        type=int,
        metavar="B",
        help="number of sequences per step",
    )
    group.add_argument(
        "--seq-length",
        type=int,
        metavar="S",
        help="tokens per sequence (default: the model's sequence length)",
    )
    group.add_argument(
        "--fix",
        metavar="KEY=VALUE,...",
        help=f"values to fix for {', '.join(FIXABLE)}; recompute is none, full or modules joined "
        "by +; layout uses Megatron's notation; pairs is yes or no",
    )
    group.add_argument(
        "--precision",
        type=str.lower,
        choices=PRECISIONS,
        help="precision of matrix products in layers (default: bf16); fp8 uses one scale per "
        "tensor",
    )
    group.add_argument(
        "--cross-entropy-loss-fusion",
        action="store_true",
        help="compute the loss in one kernel",
    )
    group.add_argument(
        "--no-overlap",
        action="store_true",
        help="do not overlap gradient reduction and parameter gathering with computation",
    )
    group.add_argument(
        "--explain",
        action="store_true",
        help="also show the assumptions with their sources and why the second layout is slower",
    )
    group.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help="draw the first layout's schedule and memory to this .svg file",
    )
    parser.add_argument(
        "model_flags",
        nargs="*",
        metavar="-- FLAGS",
        help="Megatron's flags for the model",
    )
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        help="measure individual layers of the model on this machine's device and write a .json "
        "file for --devices 64xFILE; --devices 1xKIND sets the kind of device (default: derived "
        "from its name), and --fix micro_batch=2 sets the number of sequences",
    )
    # Without --devices, `plan` runs its original function, which compares schedules.
    parser.set_defaults(run=_run_plan, run_compared=parser.get_default("run"))


def _run_plan(args: argparse.Namespace) -> int:
    if args.calibrate is not None:
        return calibrate.run(args)
    if args.devices is None:
        return _compare_schedules(args)
    refuse_others(
        args,
        (*_FLAGS, "memory_gib", "json", "trace_dir"),
        "{} compares schedules for given sizes, but --devices finds the sizes; remove one of "
        "them (to fix sizes, use --fix pp=8,schedule=zb-v)",
    )
    _check_batch(args)
    if args.picture is not None and args.picture.suffix != ".svg":
        raise ArgumentsError(f"--picture {args.picture}: unknown file type; use .svg")
    job = _job(args)
    # Run the search. If fixed sizes do not fit, forecast them anyway.
    began_s = time.monotonic()
    result = _search_with_progress(job)
    if not result.plans:
        result = _too_large(job, result)
    if args.json:
        print(json.dumps(result_as_dict(result), indent=1))
    else:
        for line in result_lines(result, time.monotonic() - began_s, job.device):
            print(line)
        if args.explain:
            for line in explanation_lines(result.plans, job.device):
                print(line)
    if args.picture is not None:
        _draw(result.plans[0], args.picture, job.device.memory_gib)
    return 0


def _compare_schedules(args: argparse.Namespace) -> int:
    """Run `plan` without a model to compare schedules.

    Raises:
        ArgumentsError: A flag needs a model.
    """
    for name in _FLAGS:
        if getattr(args, name) != args.parser.get_default(name):
            example = "--devices 64xh100"
            if args.global_batch_size is None:
                example += " --global-batch-size 1024"
            flag = name.replace("_", "-")
            raise ArgumentsError(
                f"--{flag} needs --devices; add, for example, {example}"
            )
    if args.model_flags:
        raise ArgumentsError(
            f"unknown argument {args.model_flags[0]}; see megatron-ext plan --help"
        )
    return int(args.run_compared(args))


def _check_batch(args: argparse.Namespace) -> None:
    batch = args.global_batch_size
    if batch is not None and 0 < batch <= _MAX_COUNT:
        return
    example = "--global-batch-size 1024"
    if args.model is None and not args.model_flags:
        example = f"--model examples/llama3 {example}"
    state = "missing" if batch is None else batch
    raise ArgumentsError(
        f"--global-batch-size is {state}; set the sequences per step, for example {example}"
    )


def _search_with_progress(job: Question) -> SearchResult:
    """Search on all CPUs and show progress if standard error is a terminal."""
    num_processes = 1
    # The search forks processes, which is impossible on Windows. On two slow cores, the search for
    # DeepSeek-V3 on 2,048 devices takes 55 s instead of 86 s.
    if hasattr(os, "fork"):
        num_processes = os.cpu_count() or 1
    if not sys.stderr.isatty():
        return search(job, processes=num_processes)
    try:
        return search(job, progress=_show_progress, processes=num_processes)
    finally:
        # Erase the progress line, even after an error.
        print("\r\033[K", end="", file=sys.stderr)


def _too_large(job: Question, result: SearchResult) -> SearchResult:
    """Return the forecast for fixed sizes that do not fit, and print a notice.

    Raises:
        ArgumentsError: No layout fits (the message suggests a change), or the search was
            interrupted before it found one.
        KeyboardInterrupt: The user interrupted the forecast.
    """
    if not result.is_complete:
        raise ArgumentsError(
            "interrupted before a layout that fits was found; let the search run longer"
        )
    # If the sizes are not fixed, the search has already tried every layout.
    if not job.fixed.keys() >= {"tp", "pp", "micro_batch"}:
        raise ArgumentsError(_what_would_fit(job))
    # Forecast the fixed sizes anyway: recipes make them fit with techniques that the
    # search does not try.
    unlimited = search(replace(job, device=_without_limit(job.device)), keep=1)
    if not unlimited.is_complete:
        raise KeyboardInterrupt
    if not unlimited.plans:
        raise ArgumentsError(_what_would_fit(job))
    [plan] = unlimited.plans
    # Megatron shards weights only with its own schedules and offloads whole layers only
    # if there is no pipeline.
    remedy = "fix fewer values"
    if plan.sizes.pp == 1 or plan.schedule in MEGATRONS:
        remedy = "shard the weights (--use-megatron-fsdp)"
    offload_flag = "--fine-grained-activation-offloading"
    if plan.sizes.pp == 1:
        offload_flag = "--cpu-offloading-num-layers"
    print(
        f"does not fit: the worst rank needs {max(plan.memory_gib):.0f} GiB of "
        f"{job.device.memory_gib:g}; {remedy}, or keep activations on the host ({offload_flag})",
        file=sys.stderr,
    )
    return unlimited


def _draw(plan: Layout, path: Path, limit_gib: float) -> None:
    if plan.sizes.pp == 1:
        raise ArgumentsError(
            f"--picture {path}: the first layout has no pipeline to draw; use --fix pp=2"
        )
    timeline = timeline_of(plan)
    memory_gib = plan.memory_gib
    # The second pipeline mirrors the first.
    if timeline.schedule.placement.twins == 2:
        memory_gib += memory_gib[::-1]
    text = svg.draw(timeline, unit="s", memory_gib=memory_gib, limit_gib=limit_gib)
    try:
        write_text(path, text)
    except OSError as error:
        raise ArgumentsError(
            cannot_write(path, error, "give another --picture")
        ) from error


def _job(args: argparse.Namespace) -> Question:
    model = read_model(args.model, args.size, args.model_flags)
    num_devices, device = parse_devices(args.devices)
    # The user's limit is the memory that a layout may use, so reserve nothing.
    if args.memory_gib is not None:
        device = replace(device, memory_gib=args.memory_gib, reserve_gib=0.0)
    # Correct the device's costs with the times from the traced run.
    if args.trace_dir is not None:
        factors = calibrate.of_trace(args.trace_dir, model, device)
        sources = {**device.sources, "measured": "the trace"}
        device = replace(device, measured=factors, sources=sources)
    sequence = model.sequence if args.seq_length is None else args.seq_length
    if sequence is None or not 0 < sequence <= _MAX_COUNT:
        state = "missing" if sequence is None else sequence
        raise ArgumentsError(
            f"--seq-length is {state}; add, for example, --seq-length 4096"
        )
    techniques = techniques_of_flags(model.flags, args.precision)
    fixed = _fixed(model, args.fix or "")
    _check_graphs(techniques, fixed)
    flag_names = [flag.partition("=")[0] for flag in args.model_flags]
    layout_flags = [name for name in flag_names if name in _LAYOUT_FLAGS]
    if layout_flags:
        print(
            f"plan chooses {', '.join(layout_flags)} itself; to set values, use --fix; "
            f"to check your own flags, run `megatron-ext doctor --devices {args.devices} -- FLAGS`",
            file=sys.stderr,
        )
    return Question(
        model=model,
        device=device,
        num_devices=num_devices,
        global_batch=args.global_batch_size,
        sequence=sequence,
        pair_rules=RULES.get("pairs", ()),
        techniques=techniques,
        fused_loss=args.cross_entropy_loss_fusion
        or "--cross-entropy-loss-fusion" in flag_names,
        overlaps=not args.no_overlap,
        fixed=fixed,
    )


def _check_graphs(techniques: Techniques, fixed: dict[str, Any]) -> None:
    schedule = fixed.get("schedule", MEGATRONS[0])
    if techniques.graphs not in ("auto", "none") and schedule not in MEGATRONS:
        raise ArgumentsError(
            f"--fix schedule={schedule} cannot be combined with CUDA graphs, which are captured in "
            "the order of Megatron's own schedules; remove --cuda-graph-impl and --cuda-graph-scope"
        )


def _fixed(model: ModelSizes, text: str) -> dict[str, Any]:
    """Parse `--fix` into a mapping from key to value."""
    fixed: dict[str, Any] = {}
    # A layout may contain commas, so a comma is a separator only before KEY=.
    for assignment in re.split(r",(?=[a-z_]+=)", text):
        if not assignment:
            continue
        key, _, value = assignment.partition("=")
        if key not in FIXABLE:
            raise ArgumentsError(
                f"--fix {assignment}: unknown key {key}; use {', '.join(FIXABLE)}"
            )
        if key in fixed:
            raise ArgumentsError(f"--fix {text} sets {key} twice; keep only one")
        reader = _FIXED_READERS.get(key, _positive_number)
        fixed[key] = reader(model, value, assignment)
    return fixed


def _modules(model: ModelSizes, value: str, assignment: str) -> frozenset[str]:
    """Parse the list of modules to recompute."""
    if value == "none":
        return frozenset()
    modules = frozenset(value.split("+"))
    allowed = set().union(*recompute_modes(model))
    if model.num_experts:
        allowed |= _RECIPE_MODULES
    if not modules <= allowed:
        raise ArgumentsError(
            f"--fix {assignment}: for {model.name}, use none or any of {', '.join(sorted(allowed))}"
        )
    return modules


def _schedule(_model: ModelSizes, value: str, _assignment: str) -> str:
    return get(value).name


def _yes_or_no(_model: ModelSizes, value: str, assignment: str) -> bool:
    if value not in ("yes", "no"):
        raise ArgumentsError(f"--fix {assignment} must be yes or no; use pairs=no")
    return value == "yes"


def _layers_by_stage(model: ModelSizes, value: str, assignment: str) -> list[int]:
    """Parse a layout in Megatron's notation."""
    # In a stage, E is the embedding, t a layer, m an MTP layer and L the loss.
    stages = parse_layout(value)
    layers = [stage.count("t") for stage in stages]
    after_first = "".join(stages[1:])
    before_last = "".join(stages[:-1])
    if "E" in after_first or "m" in before_last or "L" in before_last:
        raise ArgumentsError(
            f"--fix {assignment}: the planner supports the embedding only in the first stage, and "
            "MTP and the loss only in the last; put E first and mL last"
        )
    if sum(layers) != model.num_layers:
        raise ArgumentsError(
            f"--fix {assignment} has {sum(layers)} layers, but {model.name} has "
            f"{model.num_layers}; use one t per layer"
        )
    return layers


def _positive_number(_model: ModelSizes, value: str, assignment: str) -> int:
    if value.isdecimal() and int(value) > 0:
        return int(value)
    key = assignment.partition("=")[0]
    raise ArgumentsError(
        f"--fix {assignment} needs a positive whole number, such as {key}=2"
    )


_FIXED_READERS: dict[str, Callable[[ModelSizes, str, str], Any]] = {
    "recompute": _modules,
    "schedule": _schedule,
    "pairs": _yes_or_no,
    "layout": _layers_by_stage,
}
"""`--fix` key -> parser for its value. All other keys take positive numbers."""


def _show_progress(result: SearchResult, num_left: int) -> None:
    best = "nothing fits yet"
    if result.plans:
        best = f"best {result.plans[0].step_s:.3f} s"
    line = (
        f"{result.num_evaluated} layouts, {num_left} sizes left, {best}; Ctrl-C stops"
    )
    print(f"\r\033[K{line}", end="", flush=True, file=sys.stderr)


def _without_limit(device: DeviceKind) -> DeviceKind:
    return replace(device, memory_gib=UNLIMITED_GIB)


def _what_would_fit(job: Question) -> str:
    """Return the error message if no layout fits, including a change that would make one fit.

    If recomputation is fixed, the suggested change is to recompute more. If it is not fixed, or
    recomputing more is not enough, the suggestion is the smallest number of devices that is enough.
    """
    # If no layout fits even without a memory limit, the fixed values contradict each other.
    if not fits(replace(job, device=_without_limit(job.device))):
        return (
            f"--fix {fixed_text(job.fixed)} allows no layout, even with unlimited memory; fix "
            "fewer values"
        )
    problem = f"{job.model.name} does not fit on {job.num_devices} x {job.device.name}"
    # Recomputing more needs no additional devices, so suggest it first.
    if "recompute" in job.fixed:
        # The modes are in ascending order, so the first one that fits recomputes the
        # least.
        for mode in recompute_modes(job.model):
            if fits(replace(job, fixed={**job.fixed, "recompute": mode})):
                fixed_mode = mode_name(job.fixed["recompute"])
                remedy = f"use --fix recompute={mode_name(mode)}"
                return f"{problem} with recompute={fixed_mode}; {remedy}"
    num_devices = _enough_devices(job)
    if num_devices is not None:
        return f"{problem} under any layout; use {num_devices}"
    return (
        f"{problem} with {job.sequence} tokens under any layout, even with up to "
        f"{2**_MAX_DOUBLINGS}x as many devices for --global-batch-size {job.global_batch}; use "
        "devices with more memory, or shorter sequences"
    )


def _enough_devices(job: Question) -> int | None:
    """Return the smallest number of devices, in whole nodes, on which some layout fits.

    The search doubles the number until a layout fits, then bisects. Returns None if even
    2**`_MAX_DOUBLINGS` times as many devices are not enough.
    """
    node_size = min(job.device.node_size, job.num_devices)
    too_few_nodes = job.num_devices // node_size
    # Double until a layout fits.
    for _ in range(_MAX_DOUBLINGS):
        enough_nodes = too_few_nodes * 2
        if fits(replace(job, num_devices=enough_nodes * node_size)):
            break
        too_few_nodes = enough_nodes
    else:
        return None
    # Bisect between the largest number that does not fit and the smallest number that does.
    while enough_nodes - too_few_nodes > 1:
        middle_nodes = (too_few_nodes + enough_nodes) // 2
        if fits(replace(job, num_devices=middle_nodes * node_size)):
            enough_nodes = middle_nodes
        else:
            too_few_nodes = middle_nodes
    return enough_nodes * node_size
