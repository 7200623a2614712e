"""`megatron-ext plan --devices`: the layout that a model should train with, and its bound."""

# ruff: noqa: T201 - commands report on stdout and stderr

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from megatron_ext.config.stages import parse_layout
from megatron_ext.errors import ArgumentsError
from megatron_ext.planning import layer_costs
from megatron_ext.planning.hardware import DEVICES, DeviceKind, parse_devices
from megatron_ext.planning.layout_search import FIXABLE, Found, Layout, Question, search
from megatron_ext.planning.model_sizes import read_model
from megatron_ext.planning.techniques import PRECISIONS, techniques_of_flags
from megatron_ext.schedules.commands import aligned
from megatron_ext.schedules.generators.catalog import get

__all__ = ["add_to_plan", "as_dict"]

_FLAGS = (
    *("model", "size", "devices", "global_batch_size", "seq_length", "fix", "memory_gib"),
    "precision",
)
_SWITCHES = ("fp8", "cross_entropy_loss_fusion", "no_overlap", "explain")
_MOST_DOUBLINGS = 6


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
        "joined by +, layout as Megatron takes it",
    )
    group.add_argument(
        "--memory-gib", type=float, metavar="G", help="memory of a device (default: its own)"
    )
    group.add_argument(
        "--precision",
        type=str.lower,
        choices=PRECISIONS,
        help="precision of the layers' products (default: bf16); fp8 scales by tensor",
    )
    group.add_argument("--fp8", action="store_true", help="the same as --precision fp8")
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
    parser.add_argument(
        "model_flags", nargs="*", metavar="-- FLAGS", help="Megatron's flags of the model"
    )
    parser.set_defaults(run=_run_plan, run_compared=parser.get_default("run"))


def _run_plan(args: argparse.Namespace) -> int:
    if args.devices is None:
        given = [
            f"--{name.replace('_', '-')}" for name in _FLAGS if getattr(args, name) is not None
        ]
        given += [f"--{name.replace('_', '-')}" for name in _SWITCHES if getattr(args, name)]
        if given:
            example = "--devices 64xh100"
            if args.global_batch_size is None:
                example += " --global-batch-size 1024"
            raise ArgumentsError(f"{given[0]} needs --devices; add, say, {example}")
        if args.model_flags:
            raise ArgumentsError(
                f"unknown argument {args.model_flags[0]}; see megatron-ext plan --help"
            )
        return int(args.run_compared(args))
    for name in ("pp", "microbatches", "chunks", "trace_dir", "lengths"):
        if getattr(args, name) is not None:
            raise ArgumentsError(
                f"--{name.replace('_', '-')} compares schedules for sizes, --devices finds the "
                "sizes; leave one of them out (--fix pp=8 keeps a size)"
            )
    if args.global_batch_size is None or args.global_batch_size < 1:
        example = "--global-batch-size 1024"
        if args.model is None and not args.model_flags:
            example = f"--model examples/llama3 {example}"
        raise ArgumentsError(
            f"--global-batch-size is {args.global_batch_size or 'missing'}; give the sequences of "
            f"a step, say {example}"
        )
    job = _job(args)
    begun = time.monotonic()
    found = search(job, progress=_progress if sys.stderr.isatty() else lambda _found, _left: None)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    if not found.plans:
        if not found.is_complete:
            raise ArgumentsError("interrupted before any layout fitted; let it run longer")
        if not job.fixed.keys() >= {"tp", "pp", "micro_batch"}:
            raise ArgumentsError(_what_would_fit(job))
        # A forecast of given sizes, which recipes make fit by what the planner does not search.
        found = search(dataclasses.replace(job, device=_without_limit(job.device)), keep=1)
        if not found.plans:
            raise ArgumentsError(_what_would_fit(job))
        most = max(found.plans[0].memory_gib)
        print(
            f"does not fit: {most:.0f} GiB on the worst rank of {job.device.memory_gib:g}; shard "
            "the weights (--use-megatron-fsdp) or keep activations on the host (--cpu-offloading)",
            file=sys.stderr,
        )
    if args.json:
        print(json.dumps(_as_json(found), indent=1))
    else:
        _print(found, time.monotonic() - begun, explain=args.explain)
    return 0


def _job(args: argparse.Namespace) -> Question:
    model = read_model(args.model, args.size, args.model_flags)
    count, device = parse_devices(args.devices)
    if args.memory_gib is not None:
        if not 0 < args.memory_gib < 1e6:
            raise ArgumentsError(f"--memory-gib {args.memory_gib:g} must be positive")
        device = dataclasses.replace(device, memory_gib=args.memory_gib, reserve_gib=0.0)
    sequence = args.seq_length or model.sequence
    if sequence is None or sequence < 1:
        raise ArgumentsError(f"--seq-length is {sequence or 'missing'}; give the tokens, say 4096")
    fixed: dict[str, Any] = {}
    for item in filter(None, re.split(r",(?=[a-z_]+=)", args.fix or "")):
        key, _, value = item.partition("=")
        if key not in FIXABLE:
            raise ArgumentsError(f"--fix {item}: there is no {key}; use {', '.join(FIXABLE)}")
        if key == "recompute":
            fixed[key] = frozenset() if value == "none" else frozenset(value.split("+"))
        elif key == "schedule":
            fixed[key] = get(value).name
        elif key == "layout":
            fixed[key] = [stage.count("t") for stage in parse_layout(value)]
            if sum(fixed[key]) != model.num_layers:
                raise ArgumentsError(
                    f"--fix {item} has {sum(fixed[key])} layers, {model.name} has "
                    f"{model.num_layers}; give t that many times"
                )
        elif value.isdigit() and int(value) > 0:
            fixed[key] = int(value)
        else:
            raise ArgumentsError(f"--fix {item} needs a positive whole number, such as {key}=2")
    return Question(
        model=model,
        device=device,
        num_devices=count,
        global_batch=args.global_batch_size,
        sequence=sequence,
        techniques=techniques_of_flags(
            model.flags, args.precision or ("fp8" if args.fp8 else "bf16")
        ),
        fused_loss=args.cross_entropy_loss_fusion,
        overlaps=not args.no_overlap,
        fixed=fixed,
    )


def _progress(found: Found, left: int) -> None:
    best = f"best {found.plans[0].step_s:.3f} s" if found.plans else "nothing fits yet"
    line = f"\r\033[K{found.num_evaluated} layouts, {left} sizes left, {best}; Ctrl-C ends it"
    print(line, end="", flush=True, file=sys.stderr)


def _without_limit(device: DeviceKind) -> DeviceKind:
    return dataclasses.replace(device, memory_gib=1e9)


def _what_would_fit(job: Question) -> str:
    """Return the error for sizes that nothing fits, with the number of devices that would."""
    unlimited = dataclasses.replace(job, device=_without_limit(job.device))
    if not search(unlimited, keep=1).plans:
        values = ", ".join(f"{key}={value}" for key, value in job.fixed.items())
        return f"--fix allows no layout, whatever fits into memory ({values}); fix less"
    for doublings in range(1, _MOST_DOUBLINGS + 1):
        count = job.num_devices * 2**doublings
        more = dataclasses.replace(job, num_devices=count)
        try:
            fits = bool(search(more, keep=1).plans)
        except ArgumentsError:  # the batch has too few sequences for so many
            break
        if fits:
            return (
                f"{job.model.name} does not fit on {job.num_devices} x {job.device.name} under any "
                f"layout; use {count}"
            )
    return (
        f"{job.model.name} with {job.sequence} tokens does not fit on {job.num_devices} x "
        f"{job.device.name} under any layout, nor on more for --global-batch-size "
        f"{job.global_batch}; use devices with more memory, or shorter sequences"
    )


def _mode_name(mode: frozenset[str]) -> str:
    return "+".join(sorted(mode)) or "none"


def _print(found: Found, took_s: float, *, explain: bool) -> None:
    job = found.plans[0].job
    print(
        f"{job.model.name} on {job.num_devices} x {job.device.name}: {job.global_batch} sequences "
        f"of {job.sequence} tokens, {job.techniques.precision}\n"
    )
    heads = "  step s|MFU %|TFLOP/s|GiB|worst share|tp|pp|cp|ep|batch|number|schedule|recompute"
    rows = [heads.split("|")]
    for number, plan in enumerate(found.plans, start=1):
        sizes = plan.sizes
        name = f"{plan.schedule} x{plan.chunks}" if plan.chunks > 1 else plan.schedule
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
                _mode_name(sizes.mode),
            ]
        )
    print(aligned(rows))
    state = "" if found.is_complete else "interrupted; "
    print(
        f"\n{state}bound: no layout of these sizes, order or cut is below {found.bound_s:.3f} s; "
        f"the first is within {100 * found.gap:.1f} %\n{found.num_evaluated} layouts of "
        f"{found.num_sizes} sizes in {took_s:.1f} s; batch and number are of micro-batches"
    )
    first = found.plans[0]
    print(f"\nmemory by rank of the first, of {first.job.device.memory_gib:g} GiB:")
    for rank, size in enumerate(first.memory_gib):
        bar = "#" * round(50 * size / first.job.device.memory_gib)
        print(f"  {rank:>3}  {size:6.1f}  {bar}")
    print(f"\nflags of the first {len(found.plans)}:" if len(found.plans) > 1 else "\nflags:")
    for number, plan in enumerate(found.plans, start=1):
        print(f"  {number}  {plan.flags}")
    if techniques := first.job.techniques.flags:
        print(f"\nforecast with, where the model has it: {techniques}")
    if explain:
        _explain(found)


def _explain(found: Found) -> None:
    first, *others = found.plans
    print(f"\nthe most time beyond useful work: {first.limit}")
    for second in others[:1]:
        print(
            f"the second is {second.step_s - first.step_s:.3f} s slower: its work alone takes "
            f"{second.bound_s:.3f} s against {first.bound_s:.3f}, its pipeline adds "
            f"{second.pipeline_s - second.bound_s:.3f} against "
            f"{first.pipeline_s - first.bound_s:.3f}, reductions and optimizer "
            f"{second.step_s - second.pipeline_s:.3f} against {first.step_s - first.pipeline_s:.3f}"
        )
    device = first.job.device
    print("\nassumptions:")
    for name, text in layer_costs.ASSUMPTIONS.items():
        print(f"  {name}: {text}")
    print(f"\n{device.name}:")
    for each in dataclasses.fields(device):
        if each.name not in ("name", "sources"):
            source = device.sources.get(each.name, "assumed")
            print(f"  {each.name} {getattr(device, each.name):g}: {source}")


def as_dict(plan: Layout) -> dict[str, Any]:
    """Return the figures of a plan under the keys of `plan --json`."""
    sizes = plan.sizes
    return {
        "step_s": plan.step_s,
        "bound_s": plan.bound_s,
        "tokens_per_s_per_gpu": plan.tokens_per_s,
        "tflops_per_gpu": plan.tflops,
        "mfu": plan.mfu,
        "memory_gib": list(plan.memory_gib),
        "fits": plan.job.device.memory_gib < 1e9,
        "tp": sizes.tp,
        "pp": sizes.pp,
        "vp": plan.chunks,
        "cp": sizes.cp,
        "ep": sizes.ep,
        "micro_batch": sizes.micro_batch,
        "num_microbatches": sizes.num_microbatches,
        "schedule": plan.schedule,
        "recompute": _mode_name(sizes.mode),
        "layout": plan.layout,
        "shares": list(plan.shares),
        "limit": plan.limit,
        "flags": plan.flags,
        "techniques": plan.job.techniques.flags,
    }


def _as_json(found: Found) -> dict[str, Any]:
    return {
        "bound_s": found.bound_s,
        "gap": found.gap,
        "is_complete": found.is_complete,
        "sizes": found.num_sizes,
        "evaluated": found.num_evaluated,
        "plans": [as_dict(plan) for plan in found.plans],
    }
