"""`megatron-ext plan --devices`: the layout that a model should train with, and its bound."""

# ruff: noqa: T201 - commands report on stdout and stderr

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from megatron_ext.config.incompatible import RULES
from megatron_ext.errors import ArgumentsError
from megatron_ext.files import cannot_write, write_text
from megatron_ext.planning.hardware import DEVICES, DeviceKind, parse_devices
from megatron_ext.planning.layer_costs import ASSUMPTIONS, mode_name, parameters, recompute_modes
from megatron_ext.planning.layout_search import (
    FIXABLE,
    MEGATRONS,
    Found,
    Layout,
    Question,
    fits,
    fixed_text,
    search,
    timeline_of,
)
from megatron_ext.planning.model_sizes import ModelSizes, read_model
from megatron_ext.planning.techniques import PRECISIONS, techniques_of_flags
from megatron_ext.schedules.commands import aligned, refuse_others
from megatron_ext.schedules.drawing import svg
from megatron_ext.schedules.generators.catalog import get
from megatron_ext.schedules.table.cuts import parse_layout
from megatron_ext.tools import calibrate

_FLAGS = (
    *("model", "size", "devices", "global_batch_size", "seq_length", "fix", "precision"),
    *("picture", "cross_entropy_loss_fusion", "no_overlap", "explain"),
)
_CHOSEN = {
    *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"),
    *("--expert-model-parallel-size", "--micro-batch-size", "--pipeline-model-parallel-layout"),
    *("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"),
    *("--pipeline-schedule", "--enable-bitpipe-schedule", "--pipeline-layout"),
    *("--recompute-granularity", "--recompute-modules"),
}
"""Flags of the layout, which are no sizes of the model."""
_MOST_DOUBLINGS = 6
_MOST = 10**9
"""Sequences or tokens that can be planned."""


def add_to_plan(subparsers: Any) -> None:
    """Add the search for a layout to the existing subcommand `plan`."""
    parser = subparsers.choices["plan"]
    group = parser.add_argument_group(
        "a layout for a model", "sizes, cut, schedule and recomputation, with a lower bound"
    )
    group.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="a folder with model.env, such as examples/deepseek-v3, or a Hugging Face config.json",
    )
    group.add_argument("--size", metavar="NAME", help="size of an example (default: its own)")
    group.add_argument(
        "--devices",
        metavar="NxKIND",
        help=f"number and kind of devices: {', '.join(DEVICES)}, or a file, such as 64xmine.json",
    )
    group.add_argument("--global-batch-size", type=int, metavar="B", help="sequences of a step")
    group.add_argument(
        "--seq-length", type=int, metavar="S", help="tokens of a sequence (default: the model's)"
    )
    group.add_argument(
        "--fix",
        metavar="KEY=VALUE,...",
        help=f"values that stay, of {', '.join(FIXABLE)}; recompute is none, full or modules "
        "joined by +, layout as Megatron takes it, pairs yes or no",
    )
    group.add_argument(
        "--precision",
        type=str.lower,
        choices=PRECISIONS,
        help="precision of the layers' products (default: bf16); fp8 scales by tensor",
    )
    group.add_argument(
        "--cross-entropy-loss-fusion", action="store_true", help="compute the loss in one kernel"
    )
    group.add_argument(
        "--no-overlap",
        action="store_true",
        help="reduce gradients and gather parameters while nothing computes",
    )
    group.add_argument(
        "--explain",
        action="store_true",
        help="also show the assumptions with their sources, and why the second layout lost",
    )
    group.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help=".svg: the schedule of the first, and the memory of its ranks",
    )
    parser.add_argument(
        "model_flags", nargs="*", metavar="-- FLAGS", help="Megatron's flags of the model"
    )
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        help=".json: measure single layers of the model on this machine's device and write them as "
        "a device for --devices 64xFILE; --devices 1xKIND says what it is (default: by its name), "
        "--fix micro_batch=2 how many sequences",
    )
    # The command belongs to the schedules, which know no models: without --devices it runs as
    # before.
    parser.set_defaults(run=_run_plan, run_compared=parser.get_default("run"))


def _run_plan(args: argparse.Namespace) -> int:
    if args.calibrate is not None:
        return calibrate.run(args)
    if args.devices is None:
        given = [name for name in _FLAGS if getattr(args, name) != args.parser.get_default(name)]
        if given:
            flag, example = given[0].replace("_", "-"), "--devices 64xh100"
            if args.global_batch_size is None:
                example += " --global-batch-size 1024"
            raise ArgumentsError(f"--{flag} needs --devices; add, say, {example}")
        if args.model_flags:
            raise ArgumentsError(
                f"unknown argument {args.model_flags[0]}; see megatron-ext plan --help"
            )
        return int(args.run_compared(args))
    refuse_others(
        args,
        (*_FLAGS, "memory_gib", "json", "trace_dir"),
        "{} compares schedules for sizes, --devices finds the sizes; leave one of them out "
        "(--fix pp=8,schedule=zb-v keeps values)",
    )
    batch = args.global_batch_size
    if batch is None or not 0 < batch <= _MOST:
        example = "--global-batch-size 1024"
        if args.model is None and not args.model_flags:
            example = f"--model examples/llama3 {example}"
        raise ArgumentsError(
            f"--global-batch-size is {'missing' if batch is None else batch}; give the sequences "
            f"of a step, say {example}"
        )
    if args.picture is not None and args.picture.suffix != ".svg":
        raise ArgumentsError(f"--picture {args.picture}: unknown file type; use .svg")
    job = _job(args)
    begun = time.monotonic()
    shows = sys.stderr.isatty()
    try:
        found = search(
            job,
            progress=_progress if shows else lambda _found, _left: None,
            processes=(os.cpu_count() or 1) if hasattr(os, "fork") else 1,  # Windows has none
        )
    finally:
        if shows:
            print("\r\033[K", end="", file=sys.stderr)
    if not found.plans:
        found = _too_large(job, found)
    if args.json:
        content = {
            "bound_s": found.bound_s,
            "gap": found.gap,
            "is_complete": found.is_complete,
            "sizes": found.num_sizes,
            "evaluated": found.num_evaluated,
            "plans": [as_dict(plan) for plan in found.plans],
        }
        print(json.dumps(content, indent=1))
    else:
        _print(found, time.monotonic() - begun, job.device, explain=args.explain)
    if args.picture is not None:
        _draw(found.plans[0], args.picture, job.device.memory_gib)
    return 0


def _too_large(job: Question, found: Found) -> Found:
    """Return the forecast of given sizes that do not fit, with a notice.

    Raises:
        ArgumentsError: Nothing fits, with what would; or nothing was found so far.
    """
    if not found.is_complete:
        raise ArgumentsError("interrupted before any layout fitted; let it run longer")
    if not job.fixed.keys() >= {"tp", "pp", "micro_batch"}:
        raise ArgumentsError(_what_would_fit(job))
    # A forecast of given sizes, which recipes make fit by what the planner does not search.
    found = search(replace(job, device=_without_limit(job.device)), keep=1)
    if not found.is_complete:
        raise KeyboardInterrupt
    if not found.plans:
        raise ArgumentsError(_what_would_fit(job))
    [plan] = found.plans
    # Megatron shards weights under its own schedules, and offloads whole layers in one stage only.
    shards = plan.sizes.pp == 1 or plan.schedule in MEGATRONS
    remedy = "shard the weights (--use-megatron-fsdp)" if shards else "fix less"
    offload = (
        "cpu-offloading-num-layers" if plan.sizes.pp == 1 else "fine-grained-activation-offloading"
    )
    print(
        f"does not fit: {max(plan.memory_gib):.0f} GiB on the worst rank of "
        f"{job.device.memory_gib:g}; {remedy}, or keep activations on the host (--{offload})",
        file=sys.stderr,
    )
    return found


def _draw(plan: Layout, path: Path, limit_gib: float) -> None:
    if plan.sizes.pp == 1:
        raise ArgumentsError(
            f"--picture {path}: the first layout has no pipeline to draw; --fix pp=2 keeps one"
        )
    timeline, memory = timeline_of(plan), plan.memory_gib
    if timeline.schedule.placement.twins == 2:  # the second pipeline mirrors the first
        memory += memory[::-1]
    text = svg.draw(timeline, unit="s", memory_gib=memory, limit_gib=limit_gib)
    try:
        write_text(path, text)
    except OSError as error:
        raise ArgumentsError(cannot_write(path, error, "give another --picture")) from error


def _job(args: argparse.Namespace) -> Question:
    model = read_model(args.model, args.size, args.model_flags)
    count, device = parse_devices(args.devices)
    if args.memory_gib is not None:
        device = replace(device, memory_gib=args.memory_gib, reserve_gib=0.0)
    if args.trace_dir is not None:
        measured = calibrate.of_trace(args.trace_dir, model, device)
        sources = {**device.sources, "measured": "the trace"}
        device = replace(device, measured=measured, sources=sources)
    sequence = model.sequence if args.seq_length is None else args.seq_length
    if sequence is None or not 0 < sequence <= _MOST:
        raise ArgumentsError(
            f"--seq-length is {'missing' if sequence is None else sequence}; give the tokens, say "
            "4096"
        )
    techniques = techniques_of_flags(model.flags, args.precision)
    fixed = _fixed(model, args.fix or "")
    schedule = fixed.get("schedule", MEGATRONS[0])
    if techniques.graphs not in ("auto", "none") and schedule not in MEGATRONS:
        raise ArgumentsError(
            f"--fix schedule={schedule} excludes CUDA graphs, which are recorded in the order of "
            "Megatron's own schedules; leave --cuda-graph-impl and --cuda-graph-scope out"
        )
    names = [flag.partition("=")[0] for flag in args.model_flags]
    if chosen := [name for name in names if name in _CHOSEN]:
        print(
            f"plan chooses {', '.join(chosen)} itself; --fix keeps values, and "
            f"`megatron-ext doctor --devices {args.devices} -- FLAGS` judges those that you have",
            file=sys.stderr,
        )
    return Question(
        model=model,
        device=device,
        num_devices=count,
        global_batch=args.global_batch_size,
        sequence=sequence,
        pair_rules=RULES["pairs"],
        techniques=techniques,
        fused_loss=args.cross_entropy_loss_fusion or "--cross-entropy-loss-fusion" in names,
        overlaps=not args.no_overlap,
        fixed=fixed,
    )


def _fixed(model: ModelSizes, text: str) -> dict[str, Any]:
    """Read `--fix`, by key."""
    fixed: dict[str, Any] = {}
    # A layout has commas of its own: only those in front of a KEY= separate.
    for item in filter(None, re.split(r",(?=[a-z_]+=)", text)):
        key, _, value = item.partition("=")
        if key not in FIXABLE:
            raise ArgumentsError(f"--fix {item}: there is no {key}; use {', '.join(FIXABLE)}")
        if key in fixed:
            raise ArgumentsError(f"--fix {text} has {key} twice; keep one of the two")
        if key == "recompute":
            fixed[key] = frozenset() if value == "none" else frozenset(value.split("+"))
            # Of recipes, too, which the search does not try.
            others = {"core_attn", "mlp", "shared_experts"} if model.num_experts else ()
            known = set().union(*recompute_modes(model), others)
            if not fixed[key] <= known:
                raise ArgumentsError(
                    f"--fix {item}: {model.name} has {', '.join(sorted(known))}, or none; use these"
                )
        elif key == "schedule":
            fixed[key] = get(value).name
        elif key == "pairs":
            if value not in ("yes", "no"):
                raise ArgumentsError(f"--fix {item} is neither yes nor no; use pairs=no")
            fixed[key] = value == "yes"
        elif key == "layout":
            stages = parse_layout(value)
            fixed[key] = [stage.count("t") for stage in stages]
            if "E" in "".join(stages[1:]) or set("mL") & set("".join(stages[:-1])):
                raise ArgumentsError(
                    f"--fix {item}: forecasts have the embedding in the first stage, MTP and loss "
                    "in the last; put E first and mL last"
                )
            if sum(fixed[key]) != model.num_layers:
                raise ArgumentsError(
                    f"--fix {item} has {sum(fixed[key])} layers, {model.name} has "
                    f"{model.num_layers}; give t that many times"
                )
        elif value.isdecimal() and int(value) > 0:
            fixed[key] = int(value)
        else:
            raise ArgumentsError(f"--fix {item} needs a positive whole number, such as {key}=2")
    return fixed


def _progress(found: Found, left: int) -> None:
    best = f"best {found.plans[0].step_s:.3f} s" if found.plans else "nothing fits yet"
    line = f"\r\033[K{found.num_evaluated} layouts, {left} sizes left, {best}; Ctrl-C ends it"
    print(line, end="", flush=True, file=sys.stderr)


def _without_limit(device: DeviceKind) -> DeviceKind:
    return replace(device, memory_gib=1e9)


def _what_would_fit(job: Question) -> str:
    """Return the error for sizes that nothing fits, with the change that would.

    The recomputation where it is fixed, else the smallest number of devices: doubled until
    something fits, then halved in steps of a node.
    """
    if not fits(replace(job, device=_without_limit(job.device))):
        given = fixed_text(job.fixed)
        return f"--fix {given} allows no layout, whatever fits into memory; fix less"
    own = f"{job.model.name} does not fit on {job.num_devices} x {job.device.name}"
    if "recompute" in job.fixed:
        for mode in recompute_modes(job.model):
            if fits(replace(job, fixed={**job.fixed, "recompute": mode})):
                given = mode_name(job.fixed["recompute"])
                return f"{own} with recompute={given}; use --fix recompute={mode_name(mode)}"
    unit = min(job.device.node_size, job.num_devices)
    below = job.num_devices // unit
    for _ in range(_MOST_DOUBLINGS):
        enough = below * 2
        if fits(replace(job, num_devices=enough * unit)):
            while enough - below > 1:
                middle = (below + enough) // 2
                if fits(replace(job, num_devices=middle * unit)):
                    enough = middle
                else:
                    below = middle
            return f"{own} under any layout; use {enough * unit}"
        below = enough
    return (
        f"{own} with {job.sequence} tokens under any layout, nor on up to {2**_MOST_DOUBLINGS} "
        f"times as many for --global-batch-size {job.global_batch}; use devices with more memory, "
        "or shorter sequences"
    )


def _print(found: Found, took_s: float, device: DeviceKind, *, explain: bool) -> None:
    job = found.plans[0].job
    weights, active = parameters(job.model, job.device)
    shown = f"{weights / 1e9:.4g} billion parameters"
    if active < weights:
        shown += f", {active / 1e9:.3g} active"
    print(
        f"{job.model.name} ({shown}) on {job.num_devices} x {job.device.name}: {job.global_batch} "
        f"sequences of {job.sequence} tokens, {job.techniques.precision}\n"
    )
    heads = "  step s|MFU %|TFLOP/s|GiB|worst share|tp|pp|cp|ep|batch|number|schedule|recompute"
    rows = [heads.split("|")]
    for number, plan in enumerate(found.plans, start=1):
        sizes = plan.sizes
        name = f"{plan.schedule} x{plan.chunks}" if plan.chunks > 1 else plan.schedule
        name += f", pairs hide {100 * plan.hidden:.0f} %" if plan.pairs else ""
        figures = (sizes.tp, sizes.pp, sizes.cp, sizes.ep, sizes.micro_batch)
        rows.append(
            [
                f"{number} {plan.step_s:.3f}",
                f"{100 * plan.mfu:.1f}",
                f"{plan.tflops:.0f}",
                f"{max(plan.memory_gib):.1f}",
                f"{100 * max(plan.shares):.2f} %",
                *map(str, figures),
                str(sizes.num_microbatches),
                name,
                mode_name(sizes.mode),
            ]
        )
    print(aligned(rows))
    state = "" if found.is_complete else "interrupted; "
    print(
        f"\n{state}bound: no choice of sizes, schedule and cut is below {found.bound_s:.3f} s; "
        f"the first is within {100 * found.gap:.1f} %\n{found.num_evaluated} layouts of "
        f"{found.num_sizes} sizes in {took_s:.1f} s; worst share: of the work, on the busiest "
        "rank; batch and number: of micro-batches"
    )
    first = found.plans[0]
    pipeline = "" if len(first.memory_gib) == first.sizes.pp else ", one of two mirrored pipelines"
    print(f"\nmemory by rank of the first{pipeline}, of {device.memory_gib:g} GiB:")
    most = max(device.memory_gib, *first.memory_gib)
    for rank, size in enumerate(first.memory_gib):
        bar = "#" * round(50 * size / most)
        print(f"  {rank:>3}  {size:6.1f}  {bar}")
    print(f"\nflags of the first {len(found.plans)}:" if len(found.plans) > 1 else "\nflags:")
    for number, plan in enumerate(found.plans, start=1):
        print(f"  {number}  {_flags(plan)}")
    if first.techniques:
        print(f"\nthe forecast of the first is with {first.techniques}")
    if explain:
        _explain(found, device)


def _flags(plan: Layout) -> str:
    job = plan.job
    loss = " --cross-entropy-loss-fusion" if job.fused_loss else ""
    return f"{plan.flags} {job.techniques.precision_flags}{loss}"


def _explain(found: Found, device: DeviceKind) -> None:
    first, *others = found.plans
    print(f"\nthe most time beyond useful work: {first.limit}")
    for second in others[:1]:
        mine, theirs = as_dict(second), as_dict(first)
        names = ("tp", "pp", "vp", "cp", "ep", "micro_batch", "schedule", "pairs", "recompute")
        changed = [f"{name} {mine[name]}" for name in names if mine[name] != theirs[name]]
        print(
            f"the second, with {', '.join(changed)}, is {second.step_s - first.step_s:.3f} s "
            f"slower: no cut of its schedule is below {second.bound_s:.3f} s against "
            f"{first.bound_s:.3f}, its pipeline takes {second.pipeline_s:.3f} against "
            f"{first.pipeline_s:.3f}, reductions and optimizer "
            f"{second.step_s - second.pipeline_s:.3f} against {first.step_s - first.pipeline_s:.3f}"
            f"; it needs {max(second.memory_gib):.1f} GiB against {max(first.memory_gib):.1f}"
        )
    print("\nassumptions:")
    for name, text in ASSUMPTIONS.items():
        print(f"  {name}: {text}")
    print(f"\n{device.name}:")
    for each in fields(device):
        if each.name == "measured":
            for part, factors in device.measured:
                print(f"  {part} x {' '.join(f'{factor:.2f}' for factor in factors)}: "
                      f"{device.sources.get('measured', 'assumed')}")  # fmt: skip
        elif each.name not in ("name", "sources", "seconds"):
            source = device.sources.get(each.name, "assumed")
            print(f"  {each.name} {getattr(device, each.name):g}: {source}")


def as_dict(plan: Layout) -> dict[str, Any]:
    """Return the figures of a plan under the keys of `plan --json`."""
    own = "step_s bound_s mfu memory_gib static_gib kept_gib schedule pairs hidden layout shares"
    return {
        **{name: getattr(plan, name) for name in [*own.split(), "limit", "techniques"]},
        "flags": _flags(plan),
        **{name: getattr(plan.sizes, name) for name in ["tp", "pp", "cp", "ep", "micro_batch"]},
        "num_microbatches": plan.sizes.num_microbatches,
        "vp": plan.chunks,
        "recompute": mode_name(plan.sizes.mode),
        "tokens_per_s_per_gpu": plan.tokens_per_s,
        "tflops_per_gpu": plan.tflops,
        # What `_without_limit` gives a device, for a forecast of what does not fit.
        "fits": plan.job.device.memory_gib < 1e9,
    }
