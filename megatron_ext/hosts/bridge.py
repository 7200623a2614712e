"""Runs Megatron-Bridge's training loop under this package's schedules and transports.

Bridge calls Megatron's schedule as Megatron's own trainer does, so the schedule itself needs no
patch here. Two things differ:

- Bridge has no command line. Its configuration is an object, which this module reads and rewrites
  when Bridge validates it.
- Bridge has its own functions for training steps and evaluation. Patches on these functions send a
  folded pipeline's losses to the rank that logs.

The user requests a schedule with `megatron_ext.configure(PipelineConfig(...))` or, for recipes that
are started by name, with `MEGATRON_EXT_FLAGS`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_ext import devices
from megatron_ext.config import active, entrances
from megatron_ext.config.flags import (
    FLAGS,
    MEGATRON_FIELDS,
    in_fields,
    in_flags,
    parse_words,
    requested_flags,
)
from megatron_ext.config.sizes import layout_text
from megatron_ext.errors import (
    ArgumentsError,
    DataError,
    ScheduleError,
    in_python,
    reworded,
)
from megatron_ext.patches import effects, folded_pipelines, schedules
from megatron_ext.patches.point import (
    Args,
    Call,
    Kwargs,
    PatchTable,
    always,
    by_name,
)
from megatron_ext.patches.registry import REGISTRY
from megatron_ext.rules import dest_of

if TYPE_CHECKING:
    from megatron_ext.config.pipeline_config import PipelineConfig
    from megatron_ext.errors import Wording

_TRAINING = "megatron.bridge.training"

# Parts of a `ConfigContainer`, for example `container.model.transformer`. If two parts have a field
# with the same name, the later part wins.
_SECTIONS = (
    "rng",
    "optimizer",
    "ddp",
    "dist",
    "checkpoint",
    "validation",
    "train",
    "model",
    "model.transformer",
)

# Bridge enables each of these features if any of these parts sets its switch.
_SHARED_SWITCHES = ("use_distributed_optimizer", "use_megatron_fsdp", "use_torch_fsdp2")
_PARTS_WITH_SWITCHES = ("ddp", "optimizer", "dist")
_PACKING_SWITCHES = ("enable_offline_packing", "enable_in_batch_packing")

PATCHES = PatchTable(feature="Megatron-Bridge")


class FieldPlace(NamedTuple):
    """The dataclass field that holds a setting."""

    name: str
    """The dotted name that users write, such as `train.micro_batch_size`."""
    owner: Any
    """The dataclass instance that contains the field."""
    field: str


class Settings:
    """Reads and writes Bridge's `ConfigContainer` under Megatron's argument names.

    A schedule's checks, and the settings that a schedule needs, use these names
    (`megatron_ext/config/entrances.py`). Bridge stores the settings in fields of several
    dataclasses, mostly under the same names.
    """

    def __init__(self, container: Any) -> None:
        self.container = container
        self._places: dict[str, FieldPlace] = {}
        for section in _SECTIONS:
            owner = container
            for attribute in section.split("."):
                owner = getattr(owner, attribute, None)
            # Not every container has all of these parts.
            if not is_dataclass(owner):
                continue
            for field in fields(owner):
                place = FieldPlace(f"{section}.{field.name}", owner, field.name)
                self._places[field.name] = place
        for dest, field_name in MEGATRON_FIELDS.items():
            if field_name in self._places:
                self._places[dest] = self._places[field_name]
        # (id of the owner, field) -> the place and its original value
        self._saved_values: dict[tuple[int, str], tuple[FieldPlace, Any]] = {}

    def arguments(self, *, world_size: int, rank: int) -> Namespace:
        """Return the settings under Megatron's argument names."""
        container = self.container
        args = Namespace()
        for dest, place in self._places.items():
            value = getattr(place.owner, place.field)
            setattr(args, dest, value)
        parts = [getattr(container, part, None) for part in _PARTS_WITH_SWITCHES]
        for switch in _SHARED_SWITCHES:
            is_on = any(getattr(part, switch, False) for part in parts)
            setattr(args, switch, is_on)
        layout = layout_text(getattr(args, "pipeline_model_parallel_layout", None))
        args.pipeline_model_parallel_layout = layout
        # The layout sets the stages per rank, and the rules reject a job that sets both.
        if layout is not None:
            args.num_virtual_stages_per_pipeline_rank = None
        args.data_parallel_size = getattr(container, "data_parallel_size", None)
        # The rules recognise packed sequences by Megatron's flag --sft.
        dataset = getattr(container, "dataset", None)
        args.sft = any(
            getattr(dataset, switch, False) is True for switch in _PACKING_SWITCHES
        )
        args.world_size = world_size
        args.rank = rank
        return args

    def write(self, values: Mapping[str, Any]) -> None:
        """Set values by Megatron's argument names; `restore` undoes this."""
        self.keep(values)
        for dest, value in values.items():
            place = self._places[dest]
            setattr(place.owner, place.field, value)

    def keep(self, names: Iterable[str]) -> None:
        """Save the current values of settings so that `restore` can reset them."""
        for dest in names:
            place = self._places.get(dest)
            if place is None:
                continue
            value = getattr(place.owner, place.field)
            # Save only the first value: it is the user's, and later ones are ours.
            key = (id(place.owner), place.field)
            self._saved_values.setdefault(key, (place, value))

    def restore(self) -> None:
        """Restore all saved values."""
        for place, value in self._saved_values.values():
            setattr(place.owner, place.field, value)
        self._saved_values.clear()

    def in_flags(self, flag: str, value: str) -> str:
        """Return a setting as users write it: Megatron's as Bridge fields, ours as flags."""
        return self._in_bridge(flag, value) or in_flags(flag, value)

    def in_fields(self, flag: str, value: str) -> str:
        """Return a setting as users write it: Megatron's as Bridge fields, ours as fields."""
        return self._in_bridge(flag, value) or in_fields(flag, value)

    def _in_bridge(self, flag: str, value: str) -> str | None:
        """Return a setting under Bridge's name, or None if Bridge has no such setting."""
        dest = dest_of(flag)
        if dest in self._places:
            return in_python(self._places[dest].name, value)
        # Megatron's --no-NAME is NAME=False in Bridge.
        negated_dest = dest.removeprefix("no_")
        if negated_dest in self._places:
            return in_python(self._places[negated_dest].name, "False")
        return None


@dataclass
class _Hosted:
    """Bridge's settings while one of our configurations is active; `close` restores them."""

    settings: Settings
    arguments: Namespace
    """The settings under Megatron's argument names; tracing reads them too."""

    def close(self) -> None:
        """Restore the original values of Bridge's configuration, and remove our hook from it."""
        self.settings.restore()
        _remove_hook(self.settings.container.model)


def _hosted() -> _Hosted | None:
    in_force = active.active()
    if in_force is None:
        return None
    host = in_force.host
    assert host is None or isinstance(host, _Hosted)
    return host


@PATCHES.row("bridge.validate", f"{_TRAINING}.config:ConfigContainer.validate")
def _validate(
    call: Call,
    instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Bridge has no command line, so the pipeline is checked against its settings and written into
    them.
    """
    in_force = active.active()
    requested = None
    if in_force is not None:
        requested = in_force.requested
    words = requested_flags()
    flags = None
    if words:
        flags = parse_words(words, FLAGS)
    # Even if Megatron's own schedule runs, the device may need settings other than
    # Bridge's defaults.
    if requested is None and flags is None:
        _suit_device(Settings(instance))
        return call(*args, **kwargs)
    # Check this before Bridge's configuration is changed.
    REGISTRY.raise_mismatches()
    configured_sizes = None
    if in_force is not None:
        # Compare only sizes that the user passed to `configure`. With a host, they are sizes that
        # this module derived for an earlier run.
        has_users_sizes = in_force.is_sized and in_force.host is None
        if has_users_sizes:
            configured_sizes = _sizes(in_force)
    # This also restores the fields that an earlier validation changed, so that the settings below
    # are the user's.
    active.clear_configuration()
    settings = Settings(instance)
    wording = settings.in_flags if requested is None else settings.in_fields
    try:
        arguments = _prepare(settings, requested, flags, wording)
        if configured_sizes is not None:
            _check_sizes(configured_sizes, _sizes(active.required()))
        result = call(*args, **kwargs)
        # Bridge's validation may change settings, so check that the prepared values are still set.
        vars(arguments).update(vars(_arguments(settings)))
        entrances.check(arguments)
    except BaseException as error:
        active.clear_configuration()
        # Leave Bridge's configuration as the user wrote it.
        settings.restore()
        # The program may retry with another Bridge configuration, without calling `configure`.
        if requested is not None:
            entrances.await_host(requested)
        if not isinstance(error, ArgumentsError | ScheduleError):
            raise
        message = reworded(str(error), wording)
        if isinstance(error, ScheduleError):
            raise ScheduleError(message) from None
        raise ArgumentsError(message) from None
    return result


class _Sizes(NamedTuple):
    """The sizes that both `configure` and Bridge's configuration can set."""

    pipeline_ranks: int
    num_microbatches: int
    """Micro-batches per step, in both pipelines together if two are mirrored."""


def _sizes(in_force: active.Active) -> _Sizes | None:
    pipeline = in_force.pipeline or in_force.transport_only
    if pipeline is None:
        return None
    # A pipeline counts one twin's micro-batches, but users count both twins' micro-batches.
    num_microbatches = pipeline.num_microbatches * pipeline.config.twins
    return _Sizes(pipeline.pp, num_microbatches)


def _check_sizes(configured: _Sizes, hosted: _Sizes | None) -> None:
    if hosted == configured:
        return
    # One rank with Megatron's own schedule has neither a pipeline nor a transport.
    if hosted is None:
        hosted = _Sizes(1, 1)
    raise ArgumentsError(
        f"configure was given pipeline_ranks {configured.pipeline_ranks} and num_microbatches "
        f"{configured.num_microbatches}, but Bridge's configuration has {hosted.pipeline_ranks} "
        f"and {hosted.num_microbatches}; remove all sizes to use Bridge's"
    )


def _prepare(
    settings: Settings,
    requested: PipelineConfig | None,
    flags: Namespace | None,
    wording: Wording,
) -> Namespace:
    """Activate our configuration and write its values into Bridge's configuration.

    Returns:
        Bridge's settings with the prepared values, under Megatron's argument names.
    """
    model = settings.container.model
    # Like Bridge, treat only True itself as enabled, not other truthy values.
    dist_train = getattr(model, "dist_train", None)
    if getattr(dist_train, "use_dist_train", False) is True:
        raise ArgumentsError(
            "model.dist_train.use_dist_train gives encoder and language model separate ranks and "
            "runs its own 1F1B over them; set it to False, or leave megatron_ext's pipeline out"
        )
    _suit_device(settings)
    arguments = _arguments(settings)
    if flags is not None:
        if "forward_backward_disaggregating" in flags:
            raise ArgumentsError(
                "--forward-backward-disaggregating needs Megatron's own training loop, which "
                f"supports both roles; remove it from {FLAGS}, or train with "
                "pretrain_gpt.py"
            )
        vars(arguments).update(vars(flags))
    values = entrances.prepare(arguments, requested, wording=wording)
    # Check this after `prepare`, which chooses the schedule and its placement.
    _refuse_decentralized(settings.container)
    active.required().host = _Hosted(settings, arguments)
    # Save these too: Bridge or this module derives them from other settings.
    settings.keep(
        (
            "pipeline_model_parallel_layout",
            "virtual_pipeline_model_parallel_size",
            "delay_wgrad_compute",
        )
    )
    pipeline = active.pipeline()
    if pipeline is not None:
        # Megatron's parser derives these two values from other flags. Bridge has no parser, so set
        # them here.
        num_chunks = pipeline.placement.num_stages // pipeline.placement.num_ranks
        virtual_size = num_chunks if num_chunks > 1 else None
        values["virtual_pipeline_model_parallel_size"] = virtual_size
        if "overlap_p2p_comm" in values:
            values["batch_p2p_comm"] = False
    settings.write(values)
    # Recompute the data-parallel size: with two mirrored pipelines, it doubles.
    settings.container.set_data_parallel_size()
    # Remove the hook first: it must run only once, even if the same container is prepared again.
    _remove_hook(settings.container.model)
    _hooks(settings.container.model).append(_tie)
    return arguments


def _arguments(settings: Settings) -> Namespace:
    from megatron.bridge.utils.common_utils import get_rank_safe, get_world_size_safe

    return settings.arguments(
        world_size=get_world_size_safe(),
        rank=get_rank_safe(),
    )


def _suit_device(settings: Settings) -> None:
    """Replace Bridge defaults that assume NVIDIA GPUs if the device needs other values."""
    arguments = vars(_arguments(settings))
    defaults = devices.current().argument_defaults
    for dest, (value, _reason) in defaults.items():
        if dest in arguments and arguments[dest] != value:
            settings.write({dest: value})


def _refuse_decentralized(container: Any) -> None:
    """Reject settings that need Megatron's global groups if Bridge does not create them.

    Raises:
        ArgumentsError: Such a setting is used; the message names it.
    """
    if not container.dist.use_decentralized_pg:
        return
    in_force = active.required()
    pipeline = in_force.pipeline
    predicts = bool(getattr(container.model, "mtp_num_layers", None))
    # Name the first feature that uses these groups.
    remedy = "set dist.use_decentralized_pg=False"
    if in_force.config.tracing is not None:
        feature = "tracing"
    elif pipeline is None:
        return
    elif pipeline.config.twins == 2:
        feature = f"schedule {pipeline.name}, which mirrors two pipelines,"
        remedy += ", or use schedule zb-h1"
    elif pipeline.is_folded:
        feature = f"schedule {pipeline.name}, which sets a layout,"
        remedy += ", or use schedule zb-h1"
    elif pipeline.config.draws_by_microbatch:
        feature = "a dynamic order or microbatch_rng"
    elif pipeline.config.cuts_sequences and predicts:
        feature = "multi-token prediction in slices"
    else:
        return
    raise ArgumentsError(
        f"{feature} needs Megatron's global process groups, which dist.use_decentralized_pg does "
        f"not create; {remedy}"
    )


def _is_requested() -> bool:
    """Return whether the user requested a schedule, by flags or from Python."""
    if requested_flags():
        return True
    in_force = active.active()
    return in_force is not None and in_force.requested is not None


@PATCHES.row(
    "bridge.modules",
    f"{_TRAINING}.config:megatron_mimo_runtime_config_update",
    when=_is_requested,
)
def _refuse_modules(*_call: Any) -> Any:
    """Bridge would run several pipelines with its own 1F1B and ignore the chosen schedule."""
    raise ArgumentsError(
        "pretrain_megatron_mimo runs each of several models as a pipeline, with its own 1F1B; "
        f"remove megatron_ext.configure or {FLAGS}"
    )


# -- tied embeddings -----------------------------------------------------------------------------


def _tie(chunks: list[Any]) -> list[Any]:
    """Give both copies of a tied embedding on one rank the same values. Bridge calls this hook."""
    from megatron_ext.runtime.folded import tie_embeddings

    tie_embeddings(chunks)
    return chunks


def _hooks(model: Any) -> list[Any]:
    """Return the list of hooks that Bridge runs after it has wrapped a model."""
    # `megatron.training`'s model configurations use the first name, Bridge's model providers the
    # second.
    name = "_post_wrap_hooks"
    if hasattr(model, "post_wrap_hooks"):
        name = "post_wrap_hooks"
    hooks: list[Any] = vars(model).setdefault(name, [])
    return hooks


def _remove_hook(model: Any) -> None:
    hooks = _hooks(model)
    hooks[:] = [hook for hook in hooks if hook is not _tie]


# -- checkpoints ---------------------------------------------------------------------------------


def _in_fields(check: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a checkpoint check so that its errors name Bridge's fields instead of flags."""

    def check_in_fields(
        call: Call,
        instance: Any,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        try:
            return check(call, instance, args, kwargs)
        except DataError as error:
            hosted = _hosted()
            if hosted is None:
                raise
            message = reworded(str(error), hosted.settings.in_fields)
            raise DataError(message) from None

    return check_in_fields


# -- steps ---------------------------------------------------------------------------------------


@PATCHES.row(
    "bridge.train_step",
    f"{_TRAINING}.train:train_step",
    when=lambda: active.active() is not None,
)
def _train_step(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Schedules need the iteration number. Bridge logs on the last rank, but in a folded pipeline
    the first rank has the losses.
    """
    from megatron_ext.runtime.folded import share_losses, share_mtp_losses

    arguments = by_name(call, args, kwargs)
    groups = arguments["pg_collection"]
    step = int(arguments["global_state"].train_state.step)
    hosted = _hosted()
    if hosted is not None:
        hosted.arguments.iteration = step
    active.begin_iteration(step)
    losses, *other_results = call(*args, **kwargs)
    if not active.is_folded():
        return losses, *other_results
    # In a folded pipeline, send the losses from the first rank to the last rank, which logs them.
    share_mtp_losses(groups)
    return share_losses(losses, groups), *other_results


@PATCHES.row("bridge.skipped_iterations", f"{_TRAINING}.train:_dummy_train_step")
def _skip_batches(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> None:
    """Bridge reads skipped batches from one iterator, but ranks with several chunks have a list of
    iterators, so train.iterations_to_skip would stop training.
    """
    arguments = by_name(call, args, kwargs)
    data_iterators = arguments["train_data_iterator"]
    if not isinstance(data_iterators, list):
        call(*args, **kwargs)
        return
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    num_batches = get_num_microbatches()
    dataset = arguments["global_state"].cfg.dataset
    if dataset.dataloader_type == "batch":  # one item has all of a step's micro-batches
        num_batches = 1
    schedules.skip_batches(get_rerun_state_machine(), data_iterators, num_batches)


@PATCHES.row("bridge.evaluate", f"{_TRAINING}.eval:evaluate", when=active.is_folded)
def _evaluate(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Bridge logs on the last rank, but the first rank has the losses."""
    from megatron.bridge.training.utils.pg_utils import get_pg_collection

    from megatron_ext.runtime.folded import share_losses

    losses, *other_results = call(*args, **kwargs)
    # Bridge returns None if the run's time limit ends the evaluation.
    if losses is None:
        return losses, *other_results
    arguments = by_name(call, args, kwargs)
    groups = arguments.get("pg_collection")
    if groups is None:  # Bridge's own default
        groups = get_pg_collection(arguments["model"])
    return share_losses(losses, groups), *other_results


PATCHES.row(
    "bridge.measured",
    f"{_TRAINING}.train:train",
    "Bridge does not log after training how long ranks idled or how often they left table order.",
    when=schedules.is_chosen,
)(schedules.log_statistics_of)
PATCHES.row(
    "bridge.logged",
    f"{_TRAINING}.utils.train_utils:training_log",
    "Bridge does not check that the table has run and that the loss reaches the rank that logs.",
    of=effects.not_logged,
    order=-20,
)(effects.logged)
PATCHES.row(
    "bridge.checkpoint_format",
    f"{_TRAINING}.checkpointing:_load_base_checkpoint",
    "Bridge reads checkpoint formats that name layers by rank and would load the wrong layers.",
    when=active.is_folded,
)(_in_fields(folded_pipelines.check_format))


@PATCHES.row(
    "bridge.optimizer_stages",
    f"{_TRAINING}.checkpointing:_build_sharded_state_dict_metadata",
    when=active.is_folded,
)
def _note_stages(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Bridge does not record the stages in a checkpoint, so it would load other stages' optimizer
    state.
    """
    metadata = call(*args, **kwargs)
    hosted = _hosted()
    assert hosted is not None
    stages = folded_pipelines.stages_of_run(hosted.arguments)
    metadata[folded_pipelines.STAGES_ENTRY] = stages
    return metadata


def _refuse_other_stages(
    call: Call,
    _instance: Any,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    hosted = _hosted()
    settings = None if hosted is None else hosted.arguments
    folded_pipelines.check_optimizer_state(args, kwargs, settings)
    return call(*args, **kwargs)


PATCHES.row(
    "bridge.optimizer_state",
    f"{_TRAINING}.checkpointing:generate_state_dict",
    "Bridge compares only the parallel sizes and would load other stages' optimizer state.",
    when=always,
)(_in_fields(_refuse_other_stages))
