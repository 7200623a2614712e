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
"""Environment variable with this package's flags, for programs that do not parse Megatron's command
line."""
_DPP = "--use-dpp"

DROPPED = {"--data-impl": "datasets are always memory-mapped"}
"""Flags that Megatron-LM has removed, each with the reason why it is no longer needed. They are
accepted with a notice and have no effect."""

REMOVED = {
    "--fbd-forward-device": "remove it: forward ranks compute on the same kind of device"
}
"""Flags from the previous release that are now rejected, each with the remedy. Entries are kept for
one release."""


def _option_entries() -> str:
    """Return the help entries for schedule options, in the notation of `_HELP`."""
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
# Help texts by flag. The flag is followed by the field that it sets (`part.field` for a
# field in a part) and by the name of its value in the help. The field's type determines
# the accepted values. A flag without a field is a switch.
_HELP = f"""
--device-backend device
    Device that Megatron runs on. auto picks CUDA, else MUSA, else the CPU. Programs that do not
    parse these flags set MEGATRON_EXT_DEVICE instead.
--ext-list-patches
    Print the table of patches on rank 0 before training.
--pipeline-schedule schedule NAME
    Pipeline schedule: {", ".join(registered())}, or csv:FILE. `megatron-ext plan` compares them.
    auto selects the schedule with the fastest forecast that works with the other flags and fits
    into memory. auto:DIR bases the selection on the costs of the traced run in DIR (default:
    Megatron's own 1F1B or interleaved schedule).
--enable-bitpipe-schedule
    Same as --pipeline-schedule bitpipe.
{_OPTIONS}
--pipeline-transport transport
    Transport between pipeline ranks, including under Megatron's own schedules: torch.distributed,
    shared memory on one host, TCP or RDMA. With the last three, GPU tensors go through pinned
    memory. auto picks the best transport between any two ranks: GPUs on one host exchange tensors
    directly if they can; all others use torch.distributed, or RDMA or TCP with --use-dpp (default:
    torch; with --use-dpp: auto).
--node-ips node_ips ADDRESS
    Addresses for --pipeline-transport auto, tcp and rdma: one per node, in rank order, or one per
    rank (default: the addresses on the route to MASTER_ADDR).
--pipeline-device-path device_path
    How GPU tensors reach ranks on the same host over --pipeline-transport shm or auto: staged
    through pinned memory, or by CUDA IPC from GPU to GPU, which must work between all GPUs.
    auto: CUDA IPC between GPUs that support it under --pipeline-transport auto, otherwise staged
    (default: auto).
--pipeline-checksum checksums
    Checksum the bytes of each message over --pipeline-transport auto, shm, tcp or rdma, so that
    faulty memory or a faulty network stops the job instead of changing its results. This costs
    about one copy at the sender and one at the receiver. Message headers always have a checksum.
--pipeline-costs costs F,I,W[,LATENCY[,LAUNCH]]
    Durations, in any consistent unit, of a forward pass, an input gradient and a weight gradient on
    1/pp of the model, of a message, and of launching an action on a device. The schedule is
    generated and simulated with these durations (default: {UNIT}).
--pipeline-layout
    Cut the model so that the busiest rank has as little work as possible. This takes into account
    the costs of embedding, dense layers, experts, multi-token prediction and loss (default: the
    same number of layers in each stage, or Megatron's own flags).
--pipeline-slices slices K
    Cut each micro-batch's sequence into K slices of equal cost, which run through the pipeline one
    by one. This leaves about 1/K of the bubble, and about 1/K of the activations beyond those of
    one micro-batch (default: 1, whole micro-batches).
--pipeline-slice-tokens slice_tokens T
    For data of variable or packed lengths: cut each micro-batch of L > T tokens into L / T slices
    (rounded up) of equal cost. A table is generated for each step's lengths. auto: the T that
    `megatron-ext plan` finds for such lengths if its flags include --lengths FILE and
    --slice-tokens auto (default without a value: auto; without the flag: whole micro-batches).
--pipeline-waiting-weights waiting_weights N
    With --overlap-moe-expert-parallel-comm and a schedule that splits backward passes: postpone up
    to N weight gradients on each rank, each for one stage and micro-batch, and run them while the
    rank waits for tokens. This helps if experts get unequal numbers of tokens. Each postponed
    weight gradient keeps its operands in memory. auto: as many as fit into the memory that the
    planner's forecast leaves free, at most 8 (default without a value: auto; without the flag: 0,
    weight gradients run where the table places them).
--pipeline-balance balance
    For data of variable or packed lengths. order: the lengths of the micro-batches determine the
    order in which they enter the pipeline. pack: in addition, distribute the micro-batches over all
    data-parallel replicas by cost. The gradient is the same sum in a different order (default:
    off).
--pipeline-length-costs length_costs A,B
    With --pipeline-balance, --pipeline-slices or --pipeline-slice-tokens: a sample of L tokens
    costs A*L + B*L^2, in any unit. `megatron-ext plan` measures A and B if its flags include
    --lengths FILE and --trace-dir DIR (default: derived from the model's shape).
{_DPP} dynamic
    Dynamic pipeline parallelism: each rank runs the next action that is ready, instead of waiting
    for the next action in the table. --pipeline-schedule sets the table (default: interleaved if
    the model has virtual stages, else 1f1b).
--dpp-policy dynamic.policy
    With {_DPP}: which action runs first if several are ready. hint follows the table and its memory
    bound. The other policies may keep the activations of all micro-batches (default:
    {next(iter(POLICIES))}).
--dpp-extra-activations dynamic.extra_activations N
    With {_DPP} and hint: micro-batches that a rank may keep beyond the table's peak (default:
    {DynamicOrder().margin}).
--variable-seq-lengths variable_seq_lengths
    Allow micro-batches to have sequences of different lengths, up to --max-position-embeddings.
    Under every schedule, messages then include their tensors' shapes.
--microbatch-rng microbatch_rng
    Draw dropout masks by iteration, stage and micro-batch, so that all schedules, including
    Megatron's own, draw the same masks. Implied by --use-dpp.
{FLAG} disaggregation
    Run forward and backward passes in separate processes. A replica needs 2 x TP x PP processes, so
    the data-parallel size is halved and must be even.
--ignore-forward-tensor-parallel disaggregation.merged
    With {FLAG}: one forward process replaces all tensor-parallel ranks of its stage, so a replica
    has (TP + 1) x PP processes.
--fbd-activations disaggregation.activations
    With {FLAG}. recompute: backward ranks repeat the forward pass. ship: forward ranks send each
    layer's input to backward ranks, which requires full uniform recomputation (default:
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
    With --trace: output folder for this run (default: a folder in benchmark/ named after the run's
    sizes).
--hang-timeout hang_timeout_s SECONDS
    Stop the job if a training step makes no progress for this long, and name the rank that the
    other ranks are waiting for (default: the process groups' time-out applies).
{_IGNORED}
"""
_PARTS = {"dynamic": DynamicOrder, "disaggregation": Disaggregation, "tracing": Tracing}


def _choices() -> dict[str, Sequence[Any]]:
    """Return the accepted values of flags whose type does not list them."""
    choices: dict[str, Sequence[Any]] = {
        "--device-backend": DEVICES,
        "--pipeline-layout": ("auto",),
    }
    # Options get no argparse default. `_options` rejects options for other schedules, so it must
    # know whether an option was given, even with its default value.
    for generator in registered().values():
        for key, values in generator.options.items():
            choices[generator.flag(key)] = values
    return choices


_CHOICES = _choices()


class _Row(NamedTuple):
    """One of our flags."""

    flag: str
    part: str
    """The part of the configuration that contains the field; empty for the configuration itself."""
    field: str
    parse: Callable[[str], object] | None
    """Parses the value. Its errors are reported as errors in the flag."""
    options: dict[str, Any]
    """Keyword arguments of `ArgumentParser.add_argument`."""


def _row(key: str, text: str) -> _Row:
    # A key is a flag, optionally followed by its field and by the name of its value.
    words_of_key = [*key.split(), "", ""]
    flag, path, metavar = words_of_key[:3]
    # A "-" in place of the field means that the flag sets no field.
    part, _, name = path.strip("-").rpartition(".")
    owner = _PARTS.get(part, PipelineConfig)
    # A flag without a field has no annotation.
    default_kind = str if metavar else bool
    hints = get_type_hints(owner)
    kinds = kinds_of(hints.get(name, default_kind))
    kind = kinds[0]
    # The words that a flag accepts besides numbers, such as `auto`.
    words: list[str] = []
    for literal in kinds[1:]:
        words += typing.get_args(literal)
    choices = _CHOICES.get(flag)
    if get_origin(kind) is Literal:
        choices = typing.get_args(kind)
    options: dict[str, Any] = {"help": text}
    if choices is not None:
        options["choices"] = choices
    elif not metavar:
        options["action"] = "store_true"
    else:
        options["metavar"] = metavar
        if kind is int and words:
            options["type"] = partial(_number_or, words)
            # If the flag is given without a number, the number is derived.
            options |= {"nargs": "?", "const": "auto"}
        elif kind in (int, float, Path):
            options["type"] = kind
        elif get_origin(kind) is tuple:
            options["nargs"] = "+"
    # Fields in a part get no defaults here: their values must be absent unless the
    # part's switch is given.
    default = None if part else getattr(PipelineConfig, name, None)
    if "action" not in options and isinstance(default, str | int):
        options["default"] = default
    return _Row(flag, part, name, getattr(kind, "parse", None), options)


def _number_or(words: Sequence[str], text: str) -> int | str:
    """Parse the value of a flag that accepts a whole number or one of `words`."""
    if text in words:
        return text
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(
            f"{text} is neither a whole number nor {' or '.join(words)}"
        ) from None


def attribute_of(flag: str) -> str:
    """Return the attribute name that argparse derives from a flag.

    Some Megatron flags set another attribute; see `rules.dest_of`.
    """
    return flag[2:].replace("-", "_")


_ROWS = [_row(key, text) for key, text in entries(_HELP)]

_OUR_FLAGS = [*REMOVED, *[row.flag for row in _ROWS]]
DESTINATIONS = {attribute_of(flag) for flag in _OUR_FLAGS}
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
"""Field -> the flag that sets it, for error messages."""

FIELD_OF = {flag: field for field, flag in FLAG_OF.items()}
"""Flag -> the field that it sets."""


def in_flags(name: str, value: str) -> str:
    """Return a field of `PipelineConfig`, or a flag, as written on a command line (`Wording`)."""
    flag = FLAG_OF.get(name, name)
    return f"{flag} {value}" if value else flag


def with_flags(name: str, value: str) -> str:
    """Return a field of `PipelineConfig` as `--flag=value`, which `errors.reworded` can parse."""
    flag = FLAG_OF.get(name, name)
    return f"{flag}={value}" if value else flag


def in_fields(flag: str, value: str) -> str:
    """Return a flag as written in a Python program: our argument, or a Megatron field."""
    if flag in FIELD_OF:
        return in_python(FIELD_OF[flag], value)
    return in_objects(flag, value)


def in_objects(flag: str, value: str) -> str:
    """Return a flag as a field of our configuration or of Megatron's objects."""
    dest = dest_of(flag)
    if dest in DESTINATIONS:
        return in_python(FIELD_OF.get(flag, dest), value)
    # Megatron's --no-NAME is NAME=False in its objects.
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
"""Megatron argument -> field in Megatron's and Megatron-Bridge's configuration objects, where the
names differ. Rules use the argument names."""


class WordParser(ArgumentParser):
    """A parser that rejects abbreviations and raises exceptions instead of exiting.

    An abbreviation of one of our flags could be a Megatron flag, now or in the next release.
    """

    def __init__(self, prog: str) -> None:
        super().__init__(
            prog=prog,
            add_help=False,
            allow_abbrev=False,
            # Absent flags leave no attribute, so the parsed settings are those that the user gave.
            argument_default=SUPPRESS,
            conflict_handler="resolve",  # a script may redefine a Megatron flag
        )

    def error(self, message: str) -> NoReturn:
        """Raise an `ArgumentsError` that rephrases argparse's message."""
        raise ArgumentsError(parser_line(self, message))


def requested_flags(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the words in `MEGATRON_EXT_FLAGS`, split as a shell would; empty if it is not set.

    Raises:
        ArgumentsError: A quotation mark is not closed.
    """
    return split_words(environ.get(FLAGS, ""), FLAGS)


def split_words(text: str, source: str) -> tuple[str, ...]:
    """Return the words in a line, split as a shell would.

    Args:
        text: The line.
        source: Name of the line in error messages.

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
    """Return the settings in words, which may contain only this package's flags.

    Raises:
        ArgumentsError: A word is not one of our flags, or a value is invalid.
    """
    parser = add_arguments(WordParser(source))
    # The default of a flag that is absent here must not override the command line.
    for action in parser._actions:
        action.default = SUPPRESS
    try:
        return parser.parse_args(list(words))
    except ArgumentsError as error:
        raise ArgumentsError(
            f"{source} is {' '.join(words)!r}: {error}; it may contain only flags of megatron_ext, "
            "such as --pipeline-schedule zb-v --pipeline-transport shm"
        ) from None


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add our group of flags to a parser unless it already has them, and return the parser."""
    titles = [group.title for group in parser._action_groups]
    if "megatron_ext" not in titles:
        group = parser.add_argument_group(title="megatron_ext")
        for row in _ROWS:
            group.add_argument(row.flag, **row.options)
        # Accept removed flags with or without a value, so that users see the remedy instead of an
        # argparse error.
        for flag in REMOVED:
            group.add_argument(flag, nargs="?", const=True, help=SUPPRESS)
    return parser


def _value(args: Namespace, flag: str) -> Any:
    """Return a flag's value, or None if the flag was not given."""
    return getattr(args, attribute_of(flag), None)


def pipeline_config(args: Namespace) -> PipelineConfig:
    """Translate the flags into a configuration.

    `completion.completed` adds the settings that depend on the sizes. Missing flags get their
    defaults, because a namespace that upstream built from a YAML file has none of our flags.

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
            "--pipeline-layout auto requires one of this package's schedules; add "
            "--pipeline-schedule NAME"
        )
    tracing = fields_by_part["tracing"]
    # By default, lengthen the interval if it is shorter than the recording.
    if "iterations" in tracing:
        interval = max(Tracing.interval, tracing["iterations"])
        tracing.setdefault("interval", interval)
    settings = fields_by_part[""]
    for name, part in _PARTS.items():
        # The flag for a field that holds a part, such as --trace, switches the part on.
        is_on = settings.get(name)
        settings[name] = None
        if is_on:
            settings[name] = part(**fields_by_part[name])
    settings["schedule"] = schedule
    settings["options"] = _options(args, schedule)
    # Use Megatron's time-out for collectives.
    minutes = getattr(args, "distributed_timeout_minutes", None) or 10
    settings["message_timeout_s"] = 60.0 * minutes
    return PipelineConfig(**settings)


def _fields_by_part(args: Namespace) -> dict[str, dict[str, Any]]:
    """Return the values of fields that are set by flags, as part -> field -> value.

    Fields of the configuration itself belong to the part `""`.
    """
    parts = ("", *_PARTS)
    fields_by_part: dict[str, dict[str, Any]] = {part: {} for part in parts}
    for row in _ROWS:
        value = _value(args, row.flag)
        if value is None or not row.field:
            continue
        switch = FLAG_OF.get(row.part)
        # Do not test `if value`: the user may set 0.
        if switch is not None and value is not False and not _value(args, switch):
            raise ArgumentsError(
                f"{row.flag} requires {switch}; add {switch}, or remove {row.flag}"
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
            f"--enable-bitpipe-schedule and --pipeline-schedule {name} choose different schedules; "
            "remove one of them"
        )
    return "bitpipe"


def _options(args: Namespace, schedule: str | None) -> dict[str, Option]:
    """Return the schedule options that were given.

    Raises:
        ArgumentsError: An option for a different schedule was given.
    """
    options: dict[str, Option] = {}
    for generator in registered().values():
        for key in generator.options:
            flag = generator.flag(key)
            value = _value(args, flag)
            if value is None:
                continue
            if generator.name != schedule:
                chosen = "none was chosen"
                if schedule is not None:
                    chosen = f"{schedule} was chosen"
                raise ArgumentsError(
                    f"{flag} is an option of {generator.name}, but {chosen}; remove it, or use "
                    f"--pipeline-schedule {generator.name}"
                )
            options[key] = value
    return options
