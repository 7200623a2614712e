"""Schedules by name.

A generator is a pure function `(pp, num_microbatches, **options) -> Schedule` in a module in
`generators/`, decorated with `@register`. If `free_chunks` is set, the third argument is the number
of chunks. If `needs_costs` is set, the last argument is the costs. `plan`, `plot` and the tests
that cover all schedules look up generators here, so no other registration is needed. See
docs/adding-a-schedule.md.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache, lru_cache
from typing import Any

from megatron_ext.errors import ScheduleError
from megatron_ext.schedules.table.actions import Option, Schedule
from megatron_ext.schedules.table.costs import UNIT, Costs
from megatron_ext.schedules.table.table_change import take_table_changes

CSV_PREFIX = "csv:"
# Without these limits, plan, plot and doctor would never finish for absurdly large
# sizes.
MAX_RANKS = 4096
MAX_PASSES = 1 << 21
"""Maximum number of forward passes in a table. Generating a table of this size takes about ten
seconds and 1 GB of memory."""
MAX_SEARCHED_PASSES = 1 << 18
"""Maximum number of forward passes in a table produced by a search."""

Build = Callable[..., Schedule]


@dataclass(frozen=True)
class Generator:
    """A registered schedule: the function that builds its tables, and what they support."""

    name: str
    build: Build
    num_chunks: int = 1
    """Default number of stages per rank."""
    free_chunks: bool = False
    """Whether the user may choose the number of chunks, which must be at least 2."""
    options: Mapping[str, tuple[Option, ...]] = field(default_factory=dict)
    """The possible values of every additional option, default first."""
    variants: tuple[Mapping[str, Option], ...] = ({},)
    """The options (and `chunks`) of every variant shown when all schedules are compared."""
    twins: int = 1
    """2 if two mirrored pipelines share the ranks, each running half of the micro-batches."""
    alternates: bool = False
    """Whether the generator already places forward and backward passes next to each other, so that
    no feature needs to move them."""
    needs_costs: bool = False
    """Whether the table depends on costs. If so, they are the generator's last argument."""
    listed: bool = True
    """Whether `--pipeline-schedule` accepts the schedule and comparisons of all schedules include
    it."""
    searches: Callable[[int, int], bool] = lambda _pp, _num_microbatches: False
    """Takes (ranks, micro-batches) and returns whether a search produces the table."""
    flags: str | None = None
    """Training flags that select the schedule, with a `{chunks}` placeholder. If None, the flag is
    `--pipeline-schedule NAME`."""

    def complete(
        self,
        chunks: int | None,
        options: Mapping[str, Option],
    ) -> dict[str, Option]:
        """Check the options and fill in defaults.

        Raises:
            ScheduleError: An option or a value does not exist.
        """
        # The number of chunks may be specified even if it is fixed.
        if chunks not in (None, self.num_chunks) and not self.free_chunks:
            raise ScheduleError(
                f"{self.name} always splits the model into {self.num_chunks} stages per rank, not "
                f"--chunks {chunks}; remove --chunks, or use interleaved"
            )
        if self.free_chunks and chunks is not None and chunks < 2:
            raise ScheduleError(
                f"{self.name} needs at least 2 chunks, got {chunks}; use 2 or more, or 1f1b"
            )
        for key, value in options.items():
            if key not in self.options:
                keys = ", ".join(self.options) or "none"
                raise ScheduleError(
                    f"{self.name} has no option {key!r}; it has: {keys}"
                )
            values = self.options[key]
            if value not in values:
                choices = ", ".join(map(str, values))
                raise ScheduleError(
                    f"{self.name}: {key} must be one of {choices}, got {value}"
                )
        complete_options = {}
        for key, values in self.options.items():
            default = values[0]
            complete_options[key] = options.get(key, default)
        return complete_options

    def flag(self, key: str) -> str:
        """Return the flag for an option."""
        return f"--{self.name}-{key}"


# By name. Generators from this package and from plug-ins are registered here on import.
_GENERATORS: dict[str, Generator] = {}


def register(name: str, **settings: Any) -> Callable[[Build], Build]:
    """Return a decorator that registers a generator; `settings` are fields of `Generator`."""

    def enter(build: Build) -> Build:
        if name in _GENERATORS:
            first_build = _GENERATORS[name].build
            raise ScheduleError(
                f"{name} is registered twice, by {first_build.__module__} and "
                f"{build.__module__}; rename one of them"
            )
        _GENERATORS[name] = Generator(name=name, build=build, **settings)
        return build

    return enter


@cache
def _load_generators() -> None:
    # Import on first lookup, because the generator modules import this module.
    from megatron_ext.schedules import generators as package

    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def registered(*, unlisted: bool = False) -> dict[str, Generator]:
    """Return the generators by name.

    If `unlisted` is set, include generators that `--pipeline-schedule` does not accept.
    """
    _load_generators()
    # Sort by name, because plug-ins register in import order, which differs between
    # programs.
    generators = {}
    for name, generator in sorted(_GENERATORS.items()):
        if generator.listed or unlisted:
            generators[name] = generator
    return generators


def get(name: str) -> Generator:
    """Return a generator by name.

    Raises:
        ScheduleError: No schedule has this name; the message lists all names.
    """
    generators = registered(unlisted=True)
    if name not in generators:
        similar = get_close_matches(name, generators, 1)
        if similar:
            raise ScheduleError(
                f"there is no schedule {name!r}; did you mean {similar[0]}?"
            )
        raise ScheduleError(
            f"there is no schedule {name!r}; use one of {', '.join(generators)}, or "
            f"{CSV_PREFIX}FILE"
        )
    return generators[name]


def default_schedule(chunks: int | None) -> str:
    """Return the name of Megatron's own schedule with this many stages per rank."""
    return "interleaved" if chunks is not None and chunks > 1 else "1f1b"


def generate(
    name: str,
    pp: int | None = None,
    num_microbatches: int | None = None,
    chunks: int | None = None,
    costs: Costs = UNIT,
    **options: Any,
) -> Schedule:
    """Return a schedule's table, generated or loaded from a CSV file.

    Args:
        name: A registered name, or `csv:` and a path.
        pp: Number of ranks in the pipeline world. For a file, this must match the number of rows.
        num_microbatches: Number of micro-batches that these ranks run per step. For a file, this
            must match the number in the file.
        chunks: Number of stages per rank, if the schedule lets the user choose it.
        costs: Durations that features and generators with `needs_costs` optimise the table for.
        options: Options for the generator and for features (`feature_list.TABLES`).

    Raises:
        ScheduleError: No table exists for these sizes; the message states the rule and suggests
            sizes that work.
    """
    changes = take_table_changes(options)
    if name.startswith(CSV_PREFIX):
        if chunks is not None or options:
            raise ScheduleError(
                f"{name}: the file fixes chunks and options; remove them"
            )
        schedule = _loaded(name, pp, num_microbatches)
        for change in changes:
            schedule = change.of_file(schedule, costs)
        return schedule
    generator = get(name)
    complete_options = generator.complete(chunks, options)
    if pp is None or num_microbatches is None:
        raise ScheduleError(f"{name} needs both pp and num_microbatches; give both")
    _check_size("pp", pp)
    _check_size("the number of micro-batches", num_microbatches)
    # Features such as slices change the number of passes. The generator treats every
    # pass as a whole micro-batch.
    num_passes = num_microbatches
    for change in changes:
        change.check(name)
        costs = change.costs(costs)
        num_passes = change.num_passes(num_passes)
    num_chunks = chunks or generator.num_chunks
    _check_bounds(
        generator,
        pp,
        num_passes,
        num_chunks,
        has_slices=num_passes > num_microbatches,
    )
    if generator.twins == 2:
        _check_twins(name, pp, num_microbatches)
    arguments: list[int | Costs] = [pp, num_passes]
    if generator.free_chunks:
        arguments.append(num_chunks)
    if generator.needs_costs:
        # To the generator, actions therefore appear to take num_passes /
        # num_microbatches times too long, so scale the latency by the same factor. Drop
        # `slice_scale`, because it refers to the data's micro-batches, while the
        # generator's micro-batches are slices.
        latency = costs.latency * num_passes / num_microbatches
        pass_costs = replace(costs, latency=latency, slice_scale=())
        arguments.append(pass_costs)
    if generator.searches(pp, num_passes):
        # The cache needs hashable arguments, so convert them to tuples.
        schedule = _searched(
            generator.build,
            tuple(arguments),
            tuple(complete_options.items()),
        )
    else:
        schedule = generator.build(*arguments, **complete_options)
    for change in changes:
        schedule = change.change(schedule, costs, alternates=generator.alternates)
    return schedule


# Choosing a schedule already generates its table, and training then needs the same
# table. The cache is small because a table may take 100 MB.
@lru_cache(maxsize=2)
def _searched(
    build: Build,
    arguments: tuple[int | Costs, ...],
    options: tuple[tuple[str, Option], ...],
) -> Schedule:
    return build(*arguments, **dict(options))


def _loaded(
    name: str,
    pp: int | None,
    num_microbatches: int | None,
) -> Schedule:
    """Return the table in a file."""
    from megatron_ext.schedules.table.table_files import load_csv

    path = name.removeprefix(CSV_PREFIX)
    return load_csv(path, pp, num_microbatches)


def _check_size(name: str, number: int) -> None:
    if number < 1:
        raise ScheduleError(f"{name} must be at least 1, got {number}")


def _check_twins(name: str, pp: int, num_microbatches: int) -> None:
    """Check the sizes of two mirrored pipelines; `config/stages.py` checks the flags.

    Raises:
        ScheduleError: A size is odd, or there are fewer than four ranks.
    """
    if pp < 4 or pp % 2:
        near = f"{pp - 1} or {pp + 1}" if pp > 4 else "4"
        raise ScheduleError(
            f"{name} mirrors two pipelines on one set of ranks, so pp must be even and at least "
            f"4, got {pp}; use {near}, or zb-v, which accepts any"
        )
    if num_microbatches % 2:
        raise ScheduleError(
            f"{name} runs half of the micro-batches in each direction, so their number must be "
            f"even, got {num_microbatches}; use {num_microbatches + 1}"
        )


def _check_bounds(
    generator: Generator,
    pp: int,
    num_passes: int,
    chunks: int,
    *,
    has_slices: bool,
) -> None:
    """Check that it takes only seconds to generate, validate and simulate a table."""
    if pp > MAX_RANKS:
        raise ScheduleError(
            f"a pipeline of {pp} ranks is longer than the maximum of {MAX_RANKS}; use at most "
            f"{MAX_RANKS}"
        )
    # With twins, the table covers half of the ranks and half of the micro-batches.
    twins = generator.twins
    num_forwards = pp * chunks // twins * (num_passes // twins)
    max_forwards = MAX_PASSES
    if generator.searches(pp, num_passes):
        max_forwards = MAX_SEARCHED_PASSES
    if num_forwards > max_forwards:
        unit = "micro-batches"
        remedy = "use fewer"
        if has_slices:
            unit = "slices"
            remedy = "use fewer micro-batches or slices (--pipeline-slices lower, or "
            remedy += "--pipeline-slice-tokens higher)"
        raise ScheduleError(
            f"{generator.name} with {pp} ranks, {chunks} stages per rank and {num_passes} "
            f"{unit} needs {num_forwards} forward passes, but a table is limited to "
            f"{max_forwards}; "
            f"{remedy}; beyond about 4 x pp micro-batches, the bubble stays the same"
        )
