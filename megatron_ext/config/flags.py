"""Our command-line flags, and their translation into a `PipelineConfig`."""

from __future__ import annotations

import os
import shlex
import typing
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    get_origin,
    get_type_hints,
)

from megatron_ext.config.pipeline_config import (
    Disaggregation,
    DynamicOrder,
    PipelineConfig,
    Tracing,
    kinds_of,
)
from megatron_ext.devices import CHOICES as DEVICES
from megatron_ext.errors import ArgumentsError, ScheduleError, in_python, parser_line
from megatron_ext.rules import dest_of, entries
from megatron_ext.schedules.generators.catalog import registered
from megatron_ext.schedules.search.policies import POLICIES
from megatron_ext.schedules.table.costs import UNIT

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Option

FLAG = "--forward-backward-disaggregating"
FLAGS = "MEGATRON_EXT_FLAGS"
"""Environment variable with flags of this package, for programs that do not parse Megatron's
command line."""
_DPP = "--use-dpp"

DROPPED = {"--data-impl": "datasets are always the memory-mapped ones"}
"""Flags that Megatron-LM has dropped, each with the reason why it is no longer needed. They are
accepted with a notice and have no effect."""

REMOVED = {
    "--fbd-forward-device": "leave it out: forward ranks compute on the same kind of device"
}
"""Flags of the previous release that are now rejected, each with the remedy; kept for one
release."""


def _option_entries() -> str:
    """Return the entries for options of schedules, in the notation of `_HELP`."""
    lines = []
    for generator in registered().values():
        for key, values in generator.options.items():
            lines.append(generator.flag(key))
            lines.append(
                f"    Option of --pipeline-schedule {generator.name} (default: {values[0]})."
            )
    return "\n".join(lines)


_OPTIONS = _option_entries()
_IGNORED = "\n".join(
    f"{flag} - VALUE\n    Ignored: {reason}." for flag, reason in DROPPED.items()
)
# Help texts by flag. After the flag comes the field that it sets (`part.field` for a field of a
# part) and the name of its value in the help. The field's type determines the accepted values; a
# flag without a field is a switch.
_HELP = f"""
--device-backend device
    Device that Megatron runs on. auto picks CUDA, else MUSA, else the CPU. Programs that build
    their arguments themselves set MEGATRON_EXT_DEVICE instead.
--ext-list-patches
    Print the table of patches on rank 0 before training.
--pipeline-schedule schedule NAME
    Pipeline schedule: {", ".join(registered())}, or csv:FILE. `megatron-ext plan` compares them.
    auto: the fastest by forecast that these flags accept and that fits; auto:DIR by the costs of
    the traced run in DIR. Without it Megatron's own 1F1B or interleaved schedule runs.
--enable-bitpipe-schedule
    The same as --pipeline-schedule bitpipe.
{_OPTIONS}
--pipeline-transport transport
    Transport between pipeline ranks, under Megatron's own schedules too: torch.distributed, shared
    memory of one host, TCP or RDMA; over the last three, GPU tensors go through pinned memory. auto
    picks the best for each pair of ranks: GPUs of one host exchange tensors directly if they can;
    other pairs use torch.distributed, or RDMA or TCP with --use-dpp (default: torch; with
    --use-dpp: auto).
--node-ips node_ips ADDRESS
    Addresses for --pipeline-transport auto, tcp and rdma: one for each node, in the order of ranks,
    or one for each rank (default: those on the route to MASTER_ADDR).
--pipeline-device-path device_path
    How GPU tensors reach ranks of the same host over --pipeline-transport shm or auto: staged
    through pinned memory, or from GPU to GPU by CUDA IPC, which every pair of GPUs must support.
    auto: under --pipeline-transport auto by CUDA IPC where a pair can, otherwise staged (default:
    auto).
--pipeline-checksum checksums
    Checksum the bytes of each message over --pipeline-transport auto, shm, tcp or rdma, so that
    faulty memory or a faulty network ends the job instead of changing its results. Costs about a
    copy at both ends. Descriptors of messages always have a checksum.
--pipeline-costs costs F,I,W[,LATENCY[,LAUNCH]]
    Durations, in any consistent unit, of forward, input gradient and weight gradient on 1/pp of the
    model, of a message, and of launching an action on a device. The schedule is generated and
    simulated for them (default: {UNIT}).
--pipeline-layout
    Cut the layers so that the busiest rank works least: embedding, dense layers, experts,
    multi-token prediction and loss weigh what they cost (default: as many layers to each stage, or
    Megatron's own flags).
--pipeline-slices slices K
    Cut the sequence of each micro-batch into K slices of equal cost, which run through the pipeline
    one by one: about 1/K of the bubble, and of the activations beyond one micro-batch (default: 1,
    whole micro-batches).
--pipeline-slice-tokens slice_tokens T
    For data of variable or packed lengths: cut each micro-batch of more than T tokens into slices
    of equal cost, as many as its tokens are multiples of T, rounded up. The table is made for the
    lengths of each step. `megatron-ext plan` finds T if its flags include --lengths FILE and
    --slice-tokens auto (default: whole micro-batches).
--pipeline-waiting-weights waiting_weights N
    With --overlap-moe-expert-parallel-comm and a schedule that splits backwards: let N weight
    gradients of a rank, each of one stage and micro-batch, wait until the rank waits for tokens,
    and run them then. Each keeps its operands; for experts with unequal numbers of tokens. auto: as
    many as fit into the memory that the planner's forecast leaves free, at most 8 (default: 0,
    weight gradients run where the table has them).
--pipeline-balance balance
    For data of variable or packed lengths. order: let the micro-batches of a step enter the
    pipeline in an order that follows from their lengths. pack: before that, share out the
    micro-batches of all data-parallel replicas by cost. The gradient is the same sum in another
    order (default: off).
--pipeline-length-costs length_costs A,B
    With --pipeline-balance, --pipeline-slices or --pipeline-slice-tokens: a sample of L tokens
    costs A*L + B*L^2, in any unit, for example as `megatron-ext plan` measures it if its flags
    include --lengths FILE and --trace-dir DIR (default: what follows from the shape of the model).
{_DPP} dynamic
    Dynamic pipeline parallelism: each rank runs the next action that is ready, instead of waiting
    for the next one of the table. The table is that of --pipeline-schedule, by default interleaved
    where the model has virtual stages, else 1f1b.
--dpp-policy dynamic.policy
    With {_DPP}: which action runs first if several are ready. hint follows the table and its bound
    on memory, the others may keep the activations of all micro-batches (default:
    {next(iter(POLICIES))}).
--dpp-extra-activations dynamic.extra_activations N
    With {_DPP} and hint: micro-batches that a rank may keep beyond the table's peak (default:
    {DynamicOrder().margin}).
--variable-seq-lengths variable_seq_lengths
    Micro-batches may have sequences of different lengths, up to --max-position-embeddings: shapes
    travel with the tensors, under every schedule.
--microbatch-rng microbatch_rng
    Draw dropout masks by iteration, stage and micro-batch, so that all schedules, Megatron's own
    too, draw the same ones. Implied by --use-dpp.
{FLAG} disaggregation
    Run forward passes and backward passes in different processes: 2 x TP x PP processes for each
    replica, so the data-parallel size is halved and has to be even.
--ignore-forward-tensor-parallel disaggregation.merged
    With {FLAG}: one forward process replaces all tensor-parallel ranks of its stage, so a replica
    has (TP + 1) x PP processes.
--fbd-activations disaggregation.activations
    With {FLAG}: recompute: backward ranks run the forward again; ship: forward ranks send them the
    input of each layer, which needs full uniform recomputation (default:
    {Disaggregation.activations}).
--trace tracing
    Record a timeline of each rank in benchmark/<run>/; see `megatron-ext aggregate` and
    `megatron-ext report`.
--trace-interval tracing.interval N
    With --trace: length of an interval, in iterations (default: {Tracing.interval}).
--trace-iterations tracing.iterations K
    With --trace: record the first K iterations of each interval (default:
    {Tracing().num_iterations}, or all of a shorter interval).
--trace-dir tracing.directory DIR
    With --trace: output folder of this run (default: in benchmark/, named after the run's sizes).
--hang-timeout hang_timeout_s SECONDS
    End the job when a training step makes no progress for this long, and name the rank that the
    others wait for (default: the process groups' time-out applies).
{_IGNORED}
"""
_PARTS = {"dynamic": DynamicOrder, "disaggregation": Disaggregation, "tracing": Tracing}


def _choices() -> dict[str, Sequence[Any]]:
    """Return the values of flags whose type does not list them."""
    choices: dict[str, Sequence[Any]] = {
        "--device-backend": DEVICES,
        "--pipeline-layout": ("auto",),
    }
    # No argparse default: `_options` rejects options of other schedules, so it must know whether an
    # option was given, even with its default value.
    for generator in registered().values():
        for key, values in generator.options.items():
            choices[generator.flag(key)] = values
    return choices


_CHOICES = _choices()


class _Row(NamedTuple):
    """One of our flags."""

    flag: str
    part: str
    """The part of the configuration that contains the field; empty: the configuration itself."""
    field: str
    parse: Callable[[str], object] | None
    """Parses the value; its errors are reported as errors of the flag."""
    options: dict[str, Any]
    """Keywords for argparse."""


def _row(key: str, text: str) -> _Row:
    flag, path, metavar, *_ = [*key.split(), "", ""]
    part, _, name = path.strip("-").rpartition(".")
    owner = _PARTS.get(part, PipelineConfig)
    # A flag without a field, such as a former spelling, has no annotation.
    default_kind = str if metavar else bool
    kind, *more_kinds = kinds_of(get_type_hints(owner).get(name, default_kind))
    # A number, or a word such as `auto`.
    words = [word for literal in more_kinds for word in typing.get_args(literal)]
    choices = (
        typing.get_args(kind) if get_origin(kind) is Literal else _CHOICES.get(flag)
    )
    options: dict[str, Any] = {"help": text}
    if choices is not None:
        options["choices"] = choices
    elif not metavar:
        options["action"] = "store_true"
    else:
        options["metavar"] = metavar
        if kind is int and words:
            options["type"] = partial(_number_or, words)
        elif kind in (int, float, Path):
            options["type"] = kind
        elif get_origin(kind) is tuple:
            options["nargs"] = "+"
    # Fields of a part get no defaults here: without the part's switch they must be absent.
    default = None if part else getattr(PipelineConfig, name, None)
    if "action" not in options and isinstance(default, str | int):
        options["default"] = default
    return _Row(flag, part, name, getattr(kind, "parse", None), options)


def _number_or(words: Sequence[str], text: str) -> int | str:
    """Parse the value of a flag that takes a whole number or one of some words."""
    if text in words:
        return text
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(
            f"{text} is neither a whole number nor {' or '.join(words)}"
        ) from None


_ROWS = [_row(key, text) for key, text in entries(_HELP)]

_OUR_FLAGS = [*REMOVED, *[row.flag for row in _ROWS]]
DESTINATIONS = {flag[2:].replace("-", "_") for flag in _OUR_FLAGS}
"""Attribute names of our flags in the parsed arguments."""

FLAG_OF = {
    "pipeline_ranks": "--pipeline-model-parallel-size",
    "chunks": "--num-virtual-stages-per-pipeline-rank",
    "layout": "--pipeline-model-parallel-layout",
    "num_layers": "--num-layers",
    "num_microbatches": "--global-batch-size",
    "mtp_num_layers": "--mtp-num-layers",
    "pairs": "--overlap-moe-expert-parallel-comm",
    "message_timeout_s": "--distributed-timeout-minutes",
    **{row.field: row.flag for row in _ROWS if row.field},
}
"""Flag by the field that it sets, for error messages."""

FIELD_OF = {flag: field for field, flag in FLAG_OF.items()}
"""Field by the flag that sets it."""


def in_flags(name: str, value: str) -> str:
    """Return a field of `PipelineConfig`, or a flag, as written on a command line (`Wording`)."""
    flag = FLAG_OF.get(name, name)
    return f"{flag} {value}" if value else flag


def with_flags(name: str, value: str) -> str:
    """Return a field of `PipelineConfig` as `--flag=value`, which `errors.reworded` parses."""
    flag = FLAG_OF.get(name, name)
    return f"{flag}={value}" if value else flag


def in_fields(flag: str, value: str) -> str:
    """Return a flag as written in a program: our argument, or a field of Megatron's objects."""
    if flag in FIELD_OF:
        return in_python(FIELD_OF[flag], value)
    return in_objects(flag, value)


def in_objects(flag: str, value: str) -> str:
    """Return a flag as a field of our configuration or of Megatron's objects."""
    dest = dest_of(flag)
    if dest in DESTINATIONS:
        return in_python(FIELD_OF.get(flag, dest), value)
    if dest.startswith("no_") and not value:
        return in_python(dest.removeprefix("no_"), "False")
    return in_python(MEGATRON_FIELDS.get(dest, dest), value)


MEGATRON_FIELDS = {
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "enable_gloo_process_groups": "use_gloo_process_groups",
    "num_experts": "num_moe_experts",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
}
"""Field of Megatron's and Megatron-Bridge's configuration objects, by argument, where the names
differ. Rules use the arguments' names."""


class WordParser(ArgumentParser):
    """A parser that raises exceptions instead of exiting, and accepts no abbreviations.

    An abbreviation of one of our flags could be a Megatron flag, or become one in its next release.
    """

    def __init__(self, prog: str) -> None:
        super().__init__(
            prog=prog,
            add_help=False,
            allow_abbrev=False,
            argument_default=SUPPRESS,
            conflict_handler="resolve",  # a script may redefine a Megatron flag
        )

    def error(self, message: str) -> NoReturn:
        """Raise an `ArgumentsError` that rephrases argparse's message."""
        raise ArgumentsError(parser_line(self, message))


def requested_flags(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the words in `MEGATRON_EXT_FLAGS`, split as by a shell; empty if it is not set.

    Raises:
        ArgumentsError: A quotation mark is not closed.
    """
    return split_words(environ.get(FLAGS, ""), FLAGS)


def split_words(text: str, source: str) -> tuple[str, ...]:
    """Return the words of a line, split as by a shell; `source` names the line in errors.

    Raises:
        ArgumentsError: A quotation mark is not closed.
    """
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ArgumentsError(
            f"{source} is {text!r}: {error}; close the quotation"
        ) from None


def parse_words(words: Sequence[str], source: str) -> Namespace:
    """Return the settings in words that may contain only flags of this package.

    Raises:
        ArgumentsError: A word is not one of our flags, or a value is invalid.
    """
    parser = add_arguments(WordParser(source))
    # A flag that is absent here must not overrule the command line with its default.
    for action in parser._actions:
        action.default = SUPPRESS
    try:
        return parser.parse_args(list(words))
    except ArgumentsError as error:
        raise ArgumentsError(
            f"{source} is {' '.join(words)!r}: {error}; it takes the flags of megatron_ext alone, "
            "such as --pipeline-schedule zb-v --pipeline-transport shm"
        ) from None


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add our group of flags to a parser unless it has them, and return the parser."""
    if not any(group.title == "megatron_ext" for group in parser._action_groups):
        group = parser.add_argument_group(title="megatron_ext")
        for row in _ROWS:
            group.add_argument(row.flag, **row.options)
        # Accept it with or without a value, as scripts may have it, so that the user sees the
        # remedy and not an error of argparse.
        for flag in REMOVED:
            group.add_argument(flag, nargs="?", const=True, help=SUPPRESS)
    return parser


def _value(args: Namespace, flag: str) -> Any:
    """Return the value of a flag; None if it was not given."""
    return getattr(args, flag[2:].replace("-", "_"), None)


def pipeline_config(args: Namespace) -> PipelineConfig:
    """Translate the flags into a configuration; `completed` adds what depends on the sizes.

    Missing settings get their defaults, because a namespace that upstream built from a YAML file
    has none of our flags.

    Raises:
        ArgumentsError: The flags contradict each other.
        ScheduleError: The schedule does not exist.
    """
    for flag, remedy in REMOVED.items():
        if _value(args, flag) is not None:
            raise ArgumentsError(f"{flag} was removed; {remedy}")
    fields_by_part = _fields_by_part(args)
    schedule = _schedule(args)
    is_ours = schedule or _value(args, _DPP) or _value(args, FLAG)
    if _value(args, "--pipeline-layout") is not None and not is_ours:
        raise ArgumentsError(
            "--pipeline-layout auto is for schedules of this package; add --pipeline-schedule NAME"
        )
    tracing = fields_by_part["tracing"]
    if "iterations" in tracing:  # a longer recording needs a longer interval
        tracing.setdefault("interval", max(Tracing.interval, tracing["iterations"]))
    settings = fields_by_part[""]
    for name, part in _PARTS.items():
        # A part is switched on by the flag for its field.
        is_on = settings.get(name)
        settings[name] = part(**fields_by_part[name]) if is_on else None
    settings["schedule"] = schedule
    settings["options"] = _options(args, schedule)
    # Use Megatron's time-out of collectives.
    minutes = getattr(args, "distributed_timeout_minutes", None) or 10
    settings["message_timeout_s"] = 60.0 * minutes
    return PipelineConfig(**settings)


def _fields_by_part(args: Namespace) -> dict[str, dict[str, Any]]:
    """Return the fields set by flags, grouped by the part of the configuration they belong to.

    Fields of the configuration itself are under `""`.
    """
    fields_by_part: dict[str, dict[str, Any]] = {part: {} for part in ("", *_PARTS)}
    for row in _ROWS:
        value = _value(args, row.flag)
        if value is None or not row.field:
            continue
        switch = FLAG_OF.get(row.part)
        # Not `if value`, because 0 is also a given value.
        if switch is not None and value is not False and not _value(args, switch):
            raise ArgumentsError(
                f"{row.flag} is for {switch}; add {switch}, or leave {row.flag} out"
            )
        if row.parse is not None and isinstance(value, str):
            try:
                value = row.parse(value)
            except ScheduleError as error:
                raise ArgumentsError(f"{row.flag}: {error}") from error
        fields_by_part[row.part][row.field] = value
    return fields_by_part


def _schedule(args: Namespace) -> str | None:
    """Return the name of the schedule that the flags choose."""
    name: str | None = _value(args, "--pipeline-schedule")
    if not _value(args, "--enable-bitpipe-schedule"):
        return name
    if name not in (None, "bitpipe"):
        raise ArgumentsError(
            f"--enable-bitpipe-schedule and --pipeline-schedule {name} name two schedules; "
            "leave one of them out"
        )
    return "bitpipe"


def _options(args: Namespace, schedule: str | None) -> dict[str, Option]:
    """Return the schedule's options that were given; options of other schedules are an error."""
    options: dict[str, Option] = {}
    for generator in registered().values():
        for key in generator.options:
            flag = generator.flag(key)
            value = _value(args, flag)
            if value is None:
                continue
            if generator.name != schedule:
                chosen = (
                    "none was chosen" if schedule is None else f"{schedule} was chosen"
                )
                raise ArgumentsError(
                    f"{flag} is for {generator.name}, but {chosen}; leave it out, or use "
                    f"--pipeline-schedule {generator.name}"
                )
            options[key] = value
    return options
