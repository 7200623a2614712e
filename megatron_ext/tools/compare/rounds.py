"""Runs a comparison: checks the candidates, trains them in rounds, and prints the results.

    weights -> round 1: own, a, b -> round 2: b, a, own -> answer, page

If a failure or Ctrl-C stops the comparison early, the runs that have finished are still judged. The
saved weights are always deleted.
"""

# ruff: noqa: T201 - commands report on stdout and stderr

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext import files
from megatron_ext.config import automatic
from megatron_ext.config.flags import requested_flags, split_words
from megatron_ext.config.hosting import preflight
from megatron_ext.config.pipeline_config import PipelineConfig
from megatron_ext.errors import ArgumentsError, DataError, line_of
from megatron_ext.tools.compare import outcome, run, run_records, tolerances
from megatron_ext.tools.compare.locate import compare as compare_digests
from megatron_ext.tools.compare.operators import first_operator, place_of
from megatron_ext.tools.compare.page import page
from megatron_ext.tools.compare.recipe import (
    REFERENCE,
    Candidate,
    Recipe,
    candidates,
    refuse_shared,
)
from megatron_ext.tools.compare.text import answer_text
from megatron_ext.tools.launch import jobs, runs
from megatron_ext.tools.trace import aggregate, report, survey
from megatron_ext.tracing.digest_files import MEGATRONS, OPERATORS, ROUNDING
from megatron_ext.tracing.digest_files import VARIABLE as DIGESTS
from megatron_ext.tracing.operator_files import why_unavailable
from megatron_ext.tracing.step_records import FOLDER, LIMIT

if TYPE_CHECKING:
    from megatron_ext.config.refusals import Preflight
    from megatron_ext.tools.compare.locate import Difference
    from megatron_ext.tracing.operator_files import Place

_NUM_STEPS = 20
_NUM_ROUNDS = 2
_TRACED_STEPS = 3
"""Number of traced steps per run. All are warm-up steps, so tracing slows no measured step."""
_START = (
    "--exit-interval",
    "1",
    "--save-interval",
    "1",
    # The other runs use `--finetune`, which loads neither of these.
    "--no-save-optim",
    "--no-save-rng",
)
"""Flags for saving the weights after the first step."""
_WHOLE = ("--ckpt-format", "torch_dist")
"""Flags for a checkpoint format that loads into any split of the model into stages."""


def compare(
    args: argparse.Namespace, options: Sequence[str], words: Sequence[str]
) -> int:
    """Run `compare` and return its exit code.

    Args:
        args: The flags of `compare`, including those for `launch`.
        options: The words to pass to `launch` for each run.
        words: The command line as typed, for a batch job that runs it later.
    """
    command = [word for word in args.command_words if word != "--"]
    script = command[0] if command else ""
    # Flags from the environment come first, so that flags on the command line take precedence.
    recipe = Recipe.of([script, *requested_flags(), *command[1:]])
    if args.slurm is not None and not jobs.is_inside_allocation():
        # Report mistakes before the job waits in the queue. --best ranks schedules for
        # the allocation's devices, so it has to run inside the allocation.
        if not args.best:
            _planned(args, recipe, options)
        # The batch job reruns the same command line inside the allocation.
        num_option_words = len(words) - len(args.command_words)
        option_words = words[:num_option_words]
        jobs.submit(args, option_words, command, str(Path.cwd()))
        return 0
    comparison = _planned(args, recipe, options)
    if args.dry_run:
        print(comparison.plan())
        return 0
    folder = args.output or Path("compare") / runs.new_run_id()
    # Raise if the folder exists, because old and new results would mix.
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        remedy = "choose another folder with -o"
        raise DataError(files.cannot_write(folder, error, remedy)) from None
    comparison.folder = folder.absolute()
    with run.Stop().installed() as stop:
        comparison.train(stop)
    return comparison.report(as_json=args.json, stopped_by=stop.number)


def _planned(
    args: argparse.Namespace, recipe: Recipe, options: Sequence[str]
) -> Comparison:
    """Check every candidate and return the comparison.

    Raises:
        ArgumentsError: A candidate is rejected.
    """
    if args.dry_run and args.json:
        raise ArgumentsError("--dry-run has no results; remove --json")
    if args.locate and args.speed_only:
        raise ArgumentsError(
            "--locate requires runs that start from the same weights; remove --speed-only"
        )
    if args.calibrate and args.speed_only:
        raise ArgumentsError(
            "--calibrate learns how much numbers may differ, but --speed-only does not compare "
            "them; remove one of them"
        )
    if args.against_itself:
        if args.additions or args.reference or args.calibrate:
            raise ArgumentsError(
                "--self trains the recipe as it is; remove --with, --reference and --calibrate"
            )
        label = " ".join(recipe.pipeline) or REFERENCE
        contenders = [
            Candidate(f"{label}, first time", recipe.pipeline),
            Candidate(f"{label}, second time", recipe.pipeline),
        ]
    else:
        additions = [_pipeline_flags(text, "--with") for text in args.additions]
        reference = _pipeline_flags(args.reference, "--reference")
        additions += _best(args, recipe)
        contenders = candidates(recipe, reference, additions)
        recipe = _with_equal_masks(args, recipe, contenders[0])
    answers = [_checked(args, recipe, contender) for contender in contenders]
    runners = []
    # `Recipe.of` filters out our pipeline flags, which leaves only Megatron's.
    flags_of_reference = Recipe.of([recipe.script, *contenders[0].flags]).flags
    for contender, answer in zip(contenders, answers, strict=True):
        # Two runs of the same recipe must be bit-identical.
        promise = tolerances.Promise(0.0, 0.0)
        if not args.against_itself:
            flags = Recipe.of([recipe.script, *contender.flags]).flags
            same_flags = flags == flags_of_reference
            promise = tolerances.promise(answers[0], answer, same_flags=same_flags)
        chooses_wires = answer.config is not None and answer.config.wire == "auto"
        runner = outcome.Contender(
            contender,
            promise,
            schedule=_schedule_of(answer),
            is_carried=_is_carried(answer),
            chooses_wires=chooses_wires,
            notes=[*answer.changes, *answer.notices],
        )
        runners.append(runner)
    num_rounds = args.rounds or _NUM_ROUNDS
    # With --self, the two contenders already are the two runs to compare.
    if args.against_itself:
        num_rounds = 1
    return Comparison(
        recipe,
        runners,
        options,
        num_steps=args.steps or _NUM_STEPS,
        num_rounds=num_rounds,
        speed_only=args.speed_only,
        against_itself=args.against_itself,
        locates=args.locate,
        calibrates=args.calibrate,
    )


def _schedule_of(answer: Preflight) -> str:
    """Return the name under which ranks record the schedule that a contender must run."""
    if answer.pipeline is not None:
        return answer.pipeline.full.name
    assert answer.config is not None
    if answer.config.disaggregation is not None:
        return "fbd"
    return MEGATRONS


def _is_carried(answer: Preflight) -> bool:
    """Return whether our transport must carry the messages of Megatron's own schedule."""
    # `auto` may choose torch.distributed, and only the ranks know whether it did.
    carried = answer.transport_only
    return carried is not None and carried.config.wire != "auto"


def _best(args: argparse.Namespace, recipe: Recipe) -> list[tuple[str, ...]]:
    """Return the flags for the schedules chosen by `--best`, fastest first.

    Raises:
        ArgumentsError: No schedule can run, or `--trace-dir` contains nothing to rank by.
    """
    if args.trace_dir is not None and not args.best:
        raise ArgumentsError(
            "--trace-dir only affects how --best ranks schedules; add --best 3"
        )
    if not args.best:
        return []
    schedule = "auto"
    if args.trace_dir is not None:
        schedule = f"auto:{args.trace_dir}"
    reference = Candidate(REFERENCE, ())
    settings = _checked(args, recipe, reference).checked_args
    config = PipelineConfig(schedule=schedule)
    ranking = automatic.ranking(settings, config, None)
    chosen: list[tuple[str, ...]] = []
    for ranked in ranking.candidates:
        flags = split_words(ranked.flags, "--best")
        # Our schedule of this name has the same table as Megatron's
        # own, which is the reference.
        is_reference = ranked.schedule == automatic.REFERENCE
        if is_reference or not ranked.fits or len(chosen) == args.best:
            continue
        candidate = Candidate(ranked.schedule, flags)
        if _preflight(args, recipe, candidate).accepted:
            chosen.append(flags)
    say(f"--best ranks {ranking.basis}")
    if not chosen:
        raise ArgumentsError(
            f"--best {args.best} found no schedule that runs with these flags; name one with --with"
        )
    return chosen


def _pipeline_flags(text: str, flag: str) -> tuple[str, ...]:
    """Return a candidate's flags. A first word that is not a flag is a schedule name."""
    words = split_words(text, flag)
    refuse_shared(words, flag)
    if words and not words[0].startswith("--"):
        return ("--pipeline-schedule", *words)
    return words


def _with_equal_masks(
    args: argparse.Namespace, recipe: Recipe, reference: Candidate
) -> Recipe:
    """Return the recipe, with `--microbatch-rng` added if it uses dropout and other flags allow it.

    Dropout then draws the same masks under every schedule with the same stages, which makes their
    numbers comparable.
    """
    settings = _preflight(args, recipe, reference).checked_args
    rates = (
        getattr(settings, name, None)
        for name in ("hidden_dropout", "attention_dropout")
    )
    if args.speed_only or not any(rates) or recipe.has("--microbatch-rng"):
        return recipe
    note = (
        "added: --microbatch-rng, so that dropout draws the same masks in all runs with the same "
        "stages"
    )
    changed = replace(
        recipe,
        flags=(*recipe.flags, "--microbatch-rng"),
        notes=(*recipe.notes, note),
    )
    # If other flags rule it out, masks differ between runs, so
    # the numbers are not judged.
    if not _preflight(args, changed, reference).accepted:
        return recipe
    return changed


def _checked(
    args: argparse.Namespace, recipe: Recipe, candidate: Candidate
) -> Preflight:
    """Return a candidate's preflight result.

    Raises:
        ArgumentsError: The candidate is rejected.
    """
    answer = _preflight(args, recipe, candidate)
    if not answer.accepted:
        lines = [f"{candidate.label}: {refusal}" for refusal in answer.refusals]
        raise ArgumentsError("\n".join(lines))
    return answer


def _preflight(
    args: argparse.Namespace, recipe: Recipe, candidate: Candidate
) -> Preflight:
    command = recipe.command(candidate)
    with run.flags_cleared():
        # The number of ranks is only known inside the allocation.
        if args.slurm is not None and not jobs.is_inside_allocation():
            return preflight(command)
        plan = jobs.planned(args, command, str(Path.cwd()))
        # Other hosts may have a different version of Megatron than this machine.
        if all(host.local for host in plan.hosts):
            jobs.check_command_here(command)
        if all(host.slots for host in plan.hosts):
            return jobs.preflight_of(plan.completed())
        # Only the hosts themselves know how many devices they have, so the run
        # itself checks this number.
        return preflight(command)


@dataclass
class Comparison:
    """A comparison in progress: its runs and their results so far."""

    recipe: Recipe
    contenders: list[outcome.Contender]
    options: Sequence[str]
    """`launch` options for every run."""
    num_steps: int
    num_rounds: int
    speed_only: bool
    against_itself: bool
    locates: bool
    """Whether to name the first tensor that differs."""
    calibrates: bool
    """Whether to also run the reference with different rounding, to learn how much numbers may
    differ."""
    folder: Path = Path()
    rounded_digests: Path | None = None
    """The digests of the run with different rounding, or None if there is no such run."""
    calibration_failure: str = ""
    """Why that run produced no tolerances, or empty if it did, or if there was no such run."""

    @property
    def saves_weights(self) -> bool:
        """Whether an initial run saves the weights that all other runs start from."""
        return not (self.speed_only or self.recipe.loads)

    def plan(self) -> str:
        """Describe the runs: their flags, and how closely their numbers must match."""
        num_runs = self.num_rounds * len(self.contenders)
        begin = "trains"
        if self.saves_weights:
            begin = "saves weights to start from, then trains"
        lines = [
            *self.recipe.notes,
            f"{begin} {num_runs} runs of {self.num_steps} steps:",
        ]
        has_tolerance = any(owner.promise.has_tolerance for owner in self._candidates)
        if self.calibrates and has_tolerance:
            lines[-1] = lines[-1].removesuffix(":")
            lines[-1] += ", and the reference once more, rounded differently:"
        for contender in self.contenders:
            lines.append(f"{contender.candidate.label}: {self._requirement(contender)}")
            if contender.candidate.flags:
                lines.append(f"  {shlex.join(contender.candidate.flags)}")
            lines += [f"  {note}" for note in contender.notes]
        return "\n".join(lines)

    def _requirement(self, contender: outcome.Contender) -> str:
        promise = contender.promise
        if self.speed_only:
            return "numbers are not compared"
        if contender is self.contenders[0]:
            return "the reference"
        if promise.is_exact:
            return "all numbers bit-equal"
        if promise.loss is None:
            return promise.reason
        if promise.loss == 0:
            return (
                f"losses bit-equal and gradient norms within {promise.norm:g}, because "
                f"{promise.reason}"
            )
        if self.calibrates:
            return f"within what --calibrate learns, because {promise.reason}"
        return (
            f"losses within {promise.loss:g} and gradient norms within {promise.norm:g}, because "
            f"{promise.reason}"
        )

    def train(self, stop: run.Stop) -> None:
        """Run all contenders in all rounds, unless the reference fails or the user asks to stop."""
        for note in self.recipe.notes:
            say(note)
        needs_weights = self.saves_weights
        num_runs = needs_weights + self.num_rounds * len(self.contenders)
        counter = _Progress(num_runs)
        with self._weights() as weights:
            # Without common weights, runs that place the stages on different ranks
            # would draw different initial weights.
            if needs_weights and not self._save_weights(weights, counter, stop):
                return
            load: tuple[str, ...] = ()
            if needs_weights:
                # --finetune loads only the weights and starts at the first iteration.
                load = ("--load", str(weights), "--finetune", *_WHOLE)
            for number in range(1, self.num_rounds + 1):
                # Reverse every other round, so a steady drift in the machine's speed
                # affects all contenders equally.
                order = self.contenders
                if number % 2 == 0:
                    order = self.contenders[::-1]
                for contender in order:
                    # Without the reference, there is nothing to compare against.
                    if stop.number is not None or self.contenders[0].failure:
                        return
                    # A contender that has failed once would most likely fail again.
                    if not contender.failure:
                        self._train_one(contender, number, load, counter, stop)
            if self.calibrates and stop.number is None:
                self._calibrate(load, counter, stop)
            if self.locates and stop.number is None:
                self._locate(load, counter, stop)

    def report(self, *, as_json: bool, stopped_by: int | None) -> int:
        """Print the answer, write the results to files, and return the exit code."""
        answer = self._answer()
        content = outcome.as_json(answer, self.contenders)
        text = json.dumps(content, indent=1, allow_nan=False)
        has_results = any(contender.records for contender in self.contenders)
        if has_results:
            files.write_text(self.folder / "results.json", text + "\n")
            html = page(answer, self.contenders)
            files.write_text(self.folder / "compare.html", html)
        if as_json:
            print(text)
        else:
            print(answer_text(answer))
            if has_results:
                print(f"Page: {self.folder / 'compare.html'}")
        if stopped_by is not None:
            say("stopped: the answer covers the runs that have finished")
            return 128 + stopped_by
        return answer.code

    def _answer(self) -> outcome.Answer:
        answer = outcome.judge(
            self.contenders,
            speed_only=self.speed_only,
            against_itself=self.against_itself,
        )
        # The user asked for learned tolerances, so a comparison without them is a failure.
        if self.calibration_failure and answer.code == outcome.EQUAL:
            return replace(answer, code=outcome.FAILED)
        return answer

    @property
    def _candidates(self) -> list[outcome.Contender]:
        """All contenders except the reference."""
        return self.contenders[1:]

    def _calibrate(
        self, load: Sequence[str], counter: _Progress, stop: run.Stop
    ) -> None:
        """Train the reference again with different rounding and learn tolerances from that run."""
        reference = self.contenders[0]
        tolerant = []
        for owner in self._candidates:
            if owner.promise.has_tolerance and not owner.failure:
                tolerant.append(owner)
        if not tolerant:
            say(
                "--calibrate has nothing to learn, because no candidate may differ by rounding"
            )
            return
        if not reference.records:
            return
        # Train the reference again, this time rounding outputs differently.
        counter.add(1)
        counter.begin(f"{reference.candidate.label}, rounded differently")
        digests = self.folder / "digests" / "rounded"
        record_folder = self.folder / "steps" / "rounded"
        command = self.recipe.command(reference.candidate, *load)
        ended = run.launch(
            [*self.options, "--", *command],
            log_path=self.folder / "rounded.log",
            environment={
                DIGESTS: str(digests),
                ROUNDING: "1",
                FOLDER: str(record_folder),
                LIMIT: str(self.num_steps),
            },
            stop=stop,
            progress=lambda: counter.tick(record_folder, self.num_steps),
        )
        # The tolerances are derived from the differences between this run and the first round.
        reason = ended.reason
        if not ended.code:
            try:
                record = run_records.read(record_folder)
                differences = run_records.deviations(reference.records[0], record)
                reason = run_records.other_steps(record, reference.records[0])
                reason = reason or reference.substitute_in(record)
                if not reason and not tolerances.are_rounding(differences):
                    reason = (
                        "that run skipped a step, its numbers became infinite or NaN, or they "
                        "differ by more than rounding explains"
                    )
            except DataError as error:
                reason = str(error)
        if not self.locates:
            # Rounding only works while digests are recorded, but
            # only --locate reads them.
            shutil.rmtree(digests, ignore_errors=True)
        if reason:
            counter.end(reason)
            self.calibration_failure = reason
            for owner in tolerant:
                owner.notes.append(
                    f"no tolerance was learned, so the stated one applies: {reason}"
                )
            return
        for owner in tolerant:
            owner.promise = owner.promise.learned(differences)
        self.rounded_digests = digests
        counter.end(f"allows {tolerant[0].promise.allowance}")

    def _locate(self, load: Sequence[str], counter: _Progress, stop: run.Stop) -> None:
        """Retrain the contenders that differ and name the first tensor that differs."""
        reference = self.contenders[0]
        for contender, row in zip(self.contenders, self._answer().rows, strict=True):
            if row.judgement != "different" or row.deviations is None:
                continue
            if stop.number is not None:
                continue
            first_step = reference.records[0].steps[0].iteration
            last_step = row.deviations.first_iteration
            # Digests are slow and large, so train only up to the first
            # iteration with different numbers.
            num_steps = (last_step or first_step) - first_step + 1
            try:
                digests = self._record(contender, num_steps, {}, load, counter, stop)
                comparison = compare_digests(*digests, self.rounded_digests)
            except DataError as error:
                contender.located = f"the tensor could not be located: {error}"
                continue
            contender.notes += comparison.notes
            difference = comparison.difference
            if difference is None:
                contender.located = (
                    "no tensor differs in the runs that recorded digests"
                )
                if comparison.gap:
                    contender.located += f", which proves nothing: {comparison.gap}"
                elif not contender.promise.has_tolerance:
                    contender.located += "; the difference did not recur"
                else:
                    contender.located += (
                        f" by more than its tolerance: {comparison.tolerance}"
                    )
                continue
            contender.located = (
                f"{difference.sentence()}; tolerance: {comparison.tolerance}"
            )
            # If a module computed the tensor, find the module's
            # first operator that differs.
            place = place_of(difference)
            if place is not None and stop.number is None:
                operator = self._operator(
                    contender,
                    place,
                    difference,
                    load,
                    counter,
                    stop,
                )
                contender.located += f"\n{contender.candidate.label}: {operator}"

    def _operator(
        self,
        contender: outcome.Contender,
        place: Place,
        difference: Difference,
        load: Sequence[str],
        counter: _Progress,
        stop: run.Stop,
    ) -> str:
        """Train both runs again and return a sentence about the first operator that differs."""
        if reason := why_unavailable():
            return f"the operator could not be located: {reason}"
        # A recipe that resumes from a checkpoint does not start at iteration 1.
        first_step = self.contenders[0].records[0].steps[0].iteration
        num_steps = max(place.iteration - first_step + 1, 1)
        variables = {OPERATORS: str(place)}
        try:
            folders = self._record(contender, num_steps, variables, load, counter, stop)
            return first_operator(*folders, difference.tolerance).sentence
        except DataError as error:
            return f"the operator could not be located: {error}"

    def _record(
        self,
        contender: outcome.Contender,
        num_steps: int,
        variables: Mapping[str, str],
        load: Sequence[str],
        counter: _Progress,
        stop: run.Stop,
    ) -> tuple[Path, Path]:
        """Train the reference and a contender again, record digests, and return the folders.

        Args:
            contender: The contender that differs.
            num_steps: Number of steps in each run.
            variables: Extra environment variables that determine what is recorded.
            load: Flags that load the common weights.
            counter: Includes the two runs in the progress display.
            stop: Forwards signals to the runs.

        Raises:
            DataError: A run failed or did not run its schedule.
        """
        recording = "operators" if variables else "digests"
        counter.add(2)
        folders = []
        for owner in (self.contenders[0], contender):
            contender_position = self.contenders.index(contender)
            owner_position = self.contenders.index(owner)
            name = f"{recording}-{contender_position}-{owner_position}"
            folder = self.folder / "digests" / name
            record_folder = self.folder / "steps" / name
            counter.begin(
                f"{owner.candidate.label}, {num_steps} steps with {recording}"
            )
            command = self.recipe.command(owner.candidate, *load)
            ended = run.launch(
                [*self.options, "--", *command],
                log_path=self.folder / f"{name}.log",
                environment={
                    DIGESTS: str(folder),
                    FOLDER: str(record_folder),
                    LIMIT: str(num_steps),
                    **variables,
                },
                stop=stop,
                progress=counter.tick,
            )
            counter.end(ended.reason or "recorded")
            if ended.code:
                raise DataError(ended.reason)
            record = run_records.read(record_folder)
            if substitute := owner.substitute_in(record):
                raise DataError(f"{owner.candidate.label}: {substitute}")
            # For example, no W waits while digests are recorded.
            for sentence in record.departures:
                note = f"in a run with {recording}: {sentence}"
                if sentence not in owner.departures and note not in owner.notes:
                    owner.notes.append(note)
            folders.append(folder)
        return folders[0], folders[1]

    @contextmanager
    def _weights(self) -> Iterator[Path]:
        """Yield the folder for the weights that all runs start from, and delete it afterwards."""
        path = self.folder / "weights"
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def _save_weights(self, path: Path, counter: _Progress, stop: run.Stop) -> bool:
        """Save the weights that all runs start from, and return whether that succeeded."""
        # The recipe's --load folder has no checkpoint, or this run would not be needed.
        # The runs that follow load the new weights instead.
        self.recipe = self.recipe.without("--load", "--ckpt-step", "--ckpt-format")
        reference = self.contenders[0]
        command = self.recipe.command(
            reference.candidate, *_START, "--save", str(path), *_WHOLE
        )
        counter.begin("saving the weights to start from")
        ended = run.launch(
            [*self.options, "--", *command],
            log_path=self.folder / "weights.log",
            environment={},
            stop=stop,
            progress=counter.tick,
        )
        if ended.code and stop.number is not None:
            counter.end("stopped")
            return False
        if ended.code:
            reference.failure = f"the run that saves weights: {ended.reason}"
            reference.is_refused = ended.code == outcome.REFUSED
        counter.end(ended.reason or "saved")
        return not ended.code

    def _train_one(
        self,
        contender: outcome.Contender,
        round_number: int,
        load: Sequence[str],
        counter: _Progress,
        stop: run.Stop,
    ) -> None:
        """Train a contender once and keep its ranks' records."""
        position = self.contenders.index(contender)
        file_name = _file_name(contender.candidate.label)
        name = f"{position}-{file_name}-round-{round_number}"
        record_folder = self.folder / "steps" / name
        trace_folder = self.folder / "traces" / name
        # Trace only the start of the run: the next tracing interval would
        # begin after the last step.
        interval = max(self.num_steps, _TRACED_STEPS)
        tracing = (
            "--trace", "--trace-dir", str(trace_folder),
            "--trace-interval", str(interval), "--trace-iterations", str(_TRACED_STEPS),
        )  # fmt: skip
        command = self.recipe.command(contender.candidate, *load, *tracing)
        counter.begin(f"{contender.candidate.label}, round {round_number}")
        ended = run.launch(
            [*self.options, "--", *command],
            log_path=self.folder / f"{name}.log",
            environment={
                FOLDER: str(record_folder),
                LIMIT: str(self.num_steps),
            },
            stop=stop,
            progress=lambda: counter.tick(record_folder, self.num_steps),
        )
        if ended.code and stop.number is not None:
            # The user stopped the run, so this contender's
            # earlier rounds are still valid.
            counter.end("stopped")
            return
        # A failure affects only this contender; the others are still compared.
        if ended.code:
            contender.failure = f"round {round_number}: {ended.reason}"
            contender.is_refused = ended.code == outcome.REFUSED
            counter.end(ended.reason)
            return
        try:
            record = run_records.read(record_folder)
        except DataError as error:
            contender.failure = f"round {round_number}: {error}"
            counter.end(str(error))
            return
        contender.records.append(record)
        # The page needs only one round's timeline.
        if contender.timeline is None:
            _read_trace(contender, trace_folder)
        step_s = outcome.median_s([record])
        duration = "no step counts"
        if step_s is not None:
            duration = f"{1e3 * step_s:.1f} ms per step"
        counter.end(f"{duration}, {len(record.steps)} steps")


def _read_trace(contender: outcome.Contender, trace_folder: Path) -> None:
    """Set a contender's bubble and timeline from its traced steps."""
    try:
        traced = aggregate.read_run(trace_folder)
        median_step, *_ = report.measured_timelines(traced)
    except DataError as error:
        contender.notes.append(f"its timeline is missing: {error}")
        return
    contender.bubble_ratio = survey.figures(traced.surveys).bubble_ratio
    contender.timeline = median_step


def _file_name(label: str) -> str:
    """Return the label with all characters replaced that are not valid in a file name."""
    words = re.sub(r"[^A-Za-z0-9]+", "-", label)
    return words.strip("-").lower()[:40]


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"megatron-ext: {line_of(text)}", file=sys.stderr, flush=True)


class _Progress:
    """Shows which run is in progress and, on a terminal, how far it has come."""

    def __init__(self, num_runs: int) -> None:
        self._num_runs = num_runs
        self._number = 0
        self._label = ""
        self._shown = ""

    def add(self, num_runs: int) -> None:
        """Increase the expected number of runs."""
        self._num_runs += num_runs

    def begin(self, label: str) -> None:
        """Record that the next run is starting."""
        self._number += 1
        self._label = f"run {self._number} of {self._num_runs}: {label}"
        self._show("starts")

    def tick(self, record_folder: Path | None = None, num_steps: int = 0) -> None:
        """Show how many steps have been recorded in a folder."""
        num_recorded = 0
        if record_folder is not None:
            # All ranks record the same steps.
            record = record_folder / "rank-0.jsonl"
            if record.exists():
                # The first line is a header.
                num_lines = record.read_bytes().count(b"\n")
                num_recorded = max(0, num_lines - 1)
        if num_recorded:
            self._show(f"step {num_recorded} of {num_steps}")

    def end(self, text: str) -> None:
        """Print the result of a run."""
        if self._shown:
            print("\r\x1b[2K", end="", file=sys.stderr)
            self._shown = ""
        say(f"{self._label}: {text}")

    def _show(self, text: str) -> None:
        line = f"megatron-ext: {self._label}: {text}"
        if sys.stderr.isatty() and line != self._shown:
            print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)
            self._shown = line
