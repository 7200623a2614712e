"""Runs a planned job and restarts it after a failure. Each attempt has its own logs."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.errors import LaunchError, line_of
from megatron_ext.files import cannot_write
from megatron_ext.tools.launch import runs
from megatron_ext.tools.launch.agents import Agents
from megatron_ext.tools.launch.display import Display, say
from megatron_ext.tools.launch.plan import JobPlan, flag_value
from megatron_ext.tools.launch.run_folder import RunFolder
from megatron_ext.tools.launch.supervise import supervise
from megatron_ext.upstream.failure import to_resume
from megatron_ext.upstream.person_view import PersonView

if TYPE_CHECKING:
    from megatron_ext.tools.launch.failures import Failure, Outcome
    from megatron_ext.tools.launch.hostfile import Host

_LONGEST_PAUSE_S = 60.0
_MAX_DOUBLINGS = 6
"""Enough to reach the longest pause from 1 s. Many more would overflow a float."""


def shown_ranks(text: str, plan: JobPlan) -> list[int]:
    """Return the ranks that `--show` names, in order.

    Raises:
        LaunchError: `--show` names a rank that is not in this job.
    """
    num_started = plan.num_started
    if text == "all":
        return list(range(num_started))
    ranks: set[int] = set()
    for word in text.split(","):
        if word == "last":
            # The last rank logs the losses. If it is lost, any reserve rank may replace
            # it.
            possible_last_ranks = range(plan.world_size - 1, num_started)
            ranks.update(possible_last_ranks)
        elif word.isdecimal() and int(word) < num_started:
            ranks.add(int(word))
        else:
            raise LaunchError(
                f"--show names {word!r}; use all, or a list of ranks from 0 to "
                f"{num_started - 1} and last"
            )
    return sorted(ranks)


def with_restarts(
    plan: JobPlan,
    hosts: tuple[Host, ...],
    args: argparse.Namespace,
) -> int:
    """Run a job until it succeeds, is stopped or runs out of restarts; return its exit code.

    Every attempt is a separate run with its own preflight, logs and result. The runs are named ID,
    ID-r1, ID-r2 and so on. The script resumes from the last complete checkpoint, because Megatron
    records a checkpoint's iteration only after the whole checkpoint is written. `hosts` may list
    spare hosts after the hosts in the plan.
    """
    if args.max_restarts and flag_value(plan.command, "--load") is None:
        say(
            "warning: without --save and --load, a restart begins at the first iteration"
        )
    for ending in (signal.SIGTERM, signal.SIGHUP):
        # Exit normally between attempts, so that open connections are closed. During an attempt,
        # `supervise` installs its own handlers. Under nohup, SIGHUP stays ignored.
        if signal.getsignal(ending) == signal.SIG_DFL:
            signal.signal(ending, _exit_on_signal)
    failed_at: list[float] = []
    num_restarts = 0
    furthest = 0
    attempt = plan
    while True:
        outcome, completed = _attempt(attempt, args)
        now = time.monotonic()
        # Count only recent failures, so that a long job can survive more failures in total.
        failed_at = [at for at in failed_at if now - at < args.restart_window]
        # A user who stops a job while it is failing does not want it restarted either.
        may_restart = outcome.failure is not None and outcome.stopped_by is None
        if not may_restart or len(failed_at) >= args.max_restarts:
            return outcome.code
        failed_at.append(now)
        # The number of recent failures can decrease, so count all restarts to keep run
        # ids unique.
        num_restarts += 1
        # Wait longer each time, because a failed file server or switch takes a while to
        # come back.
        num_doublings = min(len(failed_at) - 1, _MAX_DOUBLINGS)
        backoff_s = 2.0**num_doublings
        pause_s = min(_LONGEST_PAUSE_S, backoff_s)
        say(
            f"restart {len(failed_at)} of {args.max_restarts} in {pause_s:g} s, because of "
            f"{outcome.failure}"
        )
        time.sleep(pause_s)
        hosts = _with_slots(hosts, completed)
        local_checkpoints_of = _continued_run(completed, outcome, furthest)
        furthest = max(furthest, outcome.iteration)
        # Start from the original plan, because `completed` contains flags derived from its hosts,
        # which may change.
        attempt = replace(
            plan,
            run_id=f"{plan.run_id}-r{num_restarts}",
            local_checkpoints_of=local_checkpoints_of,
        )
        able = _able_hosts(hosts, completed, attempt, args.preflight_timeout)
        # Never shrink a job: with fewer replicas, the batch could differ.
        num_hosts = len(completed.hosts)
        num_ranks = completed.world_size
        chosen = able[:num_hosts]
        num_missing = num_hosts - len(chosen)
        # With --keep-going, reserve hosts replace missing training hosts.
        num_reserve_hosts = max(0, plan.num_reserve_hosts - num_missing)
        if completed.reserve is not None:
            chosen = _in_place(chosen, completed)
        attempt = replace(
            attempt,
            hosts=chosen,
            num_reserve_hosts=num_reserve_hosts,
        )
        if attempt.world_size != num_ranks:
            raise LaunchError(
                f"the job needs {num_hosts} hosts with {num_ranks} ranks, but only {len(able)} of "
                f"{len(hosts)} hosts can run it; repair the others, or add spares (--spares)"
            )


def _exit_on_signal(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def _with_slots(hosts: Sequence[Host], completed: JobPlan) -> tuple[Host, ...]:
    """Return the hosts with their slots; if the hostfile does not set them, use the last count."""
    counted = {host.number: host.slots for host in completed.hosts}
    # Spare hosts have not counted their devices yet, so assume that all hosts have the same number.
    of_spares = completed.hosts[0].slots
    complete = []
    for host in hosts:
        slots = host.slots or counted.get(host.number) or of_spares
        complete.append(replace(host, slots=slots))
    return tuple(complete)


def _continued_run(ended: JobPlan, outcome: Outcome, furthest: int) -> str | None:
    """Return the run in whose folder of local checkpoints the next attempt continues, or None.

    If the folder lacks a rank's tensors, or the last global checkpoint is newer, Megatron loads
    the global one. `furthest` is the last iteration that the attempts before this one reached.
    """
    if ended.reserve is None:
        return None
    # With these flags, Megatron would load a local checkpoint's weights but begin at iteration 0.
    pretrained = flag_value(ended.flags, "--pretrained-checkpoint")
    if "--finetune" in ended.flags or pretrained is not None:
        return None
    # Local checkpoints that cannot be loaded, or that lead to the same failure again, would use up
    # all restarts.
    has_continued = ended.local_checkpoints_of is not None
    if has_continued and outcome.iteration <= furthest:
        return None
    return ended.local_checkpoints_of or ended.run_id


def _in_place(hosts: Sequence[Host], ended: JobPlan) -> tuple[Host, ...]:
    """Return the hosts in an order in which those that trained before keep their ranks.

    A rank finds only the local checkpoints that were saved on its host under its number.
    """
    unplaced = {host.number: host for host in hosts}
    staying = [unplaced.pop(host.number, None) for host in ended.training_hosts]
    newcomers = list(unplaced.values())
    ordered = []
    for host in staying:
        if host is not None:
            ordered.append(host)
        elif newcomers:
            ordered.append(newcomers.pop(0))
    return (*ordered, *newcomers)


def _able_hosts(
    hosts: tuple[Host, ...],
    ended: JobPlan,
    attempt: JobPlan,
    timeout_s: float,
) -> tuple[Host, ...]:
    """Stop whatever is left of the last attempt; return the hosts that can run the next one.

    Hosts that were lost earlier are contacted too: a rebooted host may be back, and a host whose
    network was down may still be running its part of the job.
    """
    # Processes left over from the last attempt would still hold devices and ports.
    ended_on_all_hosts = replace(ended, hosts=hosts)
    with Agents(ended_on_all_hosts) as agents:
        answers = agents.ask("stop", timeout_s + attempt.grace_s)
    problems: dict[int, list[str]] = {}
    reachable = []
    for host, answer in zip(hosts, answers, strict=True):
        if isinstance(answer, str):
            problems[host.number] = [answer]
        else:
            reachable.append(host)
    # Check the hosts that answered, as before the first attempt.
    attempt_on_reachable = replace(attempt, hosts=tuple(reachable))
    with Agents(attempt_on_reachable) as agents:
        hellos = agents.look(timeout_s)
        for host, hello in zip(reachable, hellos, strict=True):
            problems[host.number] = hello["problems"]
    able = []
    for host in hosts:
        problems_of_host = problems[host.number]
        for text in problems_of_host:
            say(f"{host.name}: {text}")
        if not problems_of_host:
            able.append(host)
    return tuple(able)


def _attempt(
    plan: JobPlan,
    args: argparse.Namespace,
) -> tuple[Outcome, JobPlan]:
    """Run a job once; return the outcome and the plan with all process counts."""
    directory = runs.runs_root() / plan.run_id
    with ExitStack() as resources:
        agents = resources.enter_context(Agents(plan))
        hellos = agents.look(args.preflight_timeout)
        # A job starts on all hosts or on none, so report all problems before any host
        # starts it.
        problems = _of_hosts(plan, hellos, "problems")
        if problems:
            raise LaunchError("\n".join(problems))
        num_devices = [hello["devices"] for hello in hellos]
        plan = plan.completed(num_devices)
        show = shown_ranks(args.show, plan)
        # Write the files before the job starts, so that `stop` can find it even if the launcher
        # dies.
        try:
            folder = RunFolder.open(runs.runs_root(), plan.run_id, create=True)
            resources.enter_context(folder)
            if folder.exists("plan.json"):
                raise LaunchError(
                    f"run {plan.run_id} already exists; use another --run-id"
                )
            folder.write_json("plan.json", plan.record())
            folder.write_json("launcher.json", runs.record())
            log = folder.create("output.log")
            resources.enter_context(log)
        except OSError as error:
            remedy = "free some space, or set MEGATRON_EXT_RUNS to another directory"
            raise LaunchError(cannot_write(directory, error, remedy)) from None
        for warning in _of_hosts(plan, hellos, "warnings"):
            say(f"warning: {warning}")
        say(f"run {plan.run_id}: {plan.summary()}")
        log_path = directory / "output.log"
        view = None
        if _has_view(args, plan):
            view = PersonView()
            if len(plan.hosts) == 1 or plan.reserve is not None:
                # Send all ranks' output to the view, because it adds up their
                # parameters and shows any rank that fails. With several hosts, this
                # takes too much bandwidth, but --keep-going needs it, because any rank
                # may become the one that logs the steps.
                show = list(range(plan.num_started))
            if len(show) == plan.num_started:
                say(f"everything the ranks print: {log_path}")
            else:
                say(f"everything ranks {args.show} print: {log_path}")
        with closing(Display(sys.stdout.buffer, log, view)) as display:
            outcome = supervise(agents, plan, hellos, display, show)
        # The log is complete now, because the display has written its last lines.
        end = _End(plan, outcome, display, view, show, log_path)
        try:
            # If the disk is full, the exit code must still be the job's.
            folder.write_json("result.json", end.record())
        except OSError as error:
            say(
                f"warning: {directory / 'result.json'} cannot be written: {error.strerror}"
            )
    end.tell()
    return outcome, plan


def _of_hosts(
    plan: JobPlan,
    hellos: Sequence[runs.Json],
    kind: str,
) -> list[str]:
    """Return the problems or warnings from all hosts, one line each."""
    lines = []
    for host, hello in zip(plan.hosts, hellos, strict=True):
        lines += [f"{host.name}: {text}" for text in hello[kind]]
    return lines


def _has_view(args: argparse.Namespace, plan: JobPlan) -> bool:
    """Return whether to shorten the output: true for Megatron's scripts without --raw or --help."""
    script = Path(plan.command[0]).name
    is_megatrons = script.startswith("pretrain_")
    # The view would drop the help text.
    asks_for_help = "-h" in plan.command or "--help" in plan.command
    return is_megatrons and not args.raw and not asks_for_help


@dataclass
class _End:
    """How an attempt finished, for the record and for the user."""

    plan: JobPlan
    outcome: Outcome
    display: Display
    view: PersonView | None
    show: Sequence[int]
    """Ranks whose output was shown."""
    log_path: Path
    """File with these ranks' complete output."""

    @property
    def _is_seen(self) -> bool:
        """Whether the view has already shown the failed rank's errors."""
        return self.view is not None and self.outcome.failed_rank in self.show

    @property
    def _logs(self) -> str:
        """A pointer to the full output: the log file or the command that shows the logs."""
        failure = self.outcome.failure
        is_shortened_success = failure is None and self.view is not None
        if self._is_seen or is_shortened_success:
            return f"everything: {self.log_path}"
        words = ["megatron-ext", "logs", self.plan.run_id]
        words += self.plan.flags_to_reach()
        place = ""
        if failure is not None:
            if failure.rank is not None:
                words += ["--rank", str(failure.rank)]
            if failure.log is not None:
                place = f" ({failure.host}:{failure.log})"
        return f"logs: {shlex.join(words)}{place}"

    def record(self) -> runs.Json:
        """Return the attempt's result, which `status` shows later."""
        failure = self.outcome.failure
        return {
            "exit_code": self.outcome.code,
            "failure": None if failure is None else str(failure),
            "stopped_by": self.outcome.stopped_by,
            "logs": self._logs,
        }

    def tell(self) -> None:
        """Print how the job finished; the last line states the cause of any failure."""
        if self.display.left_out:
            say(
                f"{self.display.left_out} lines were not shown because the output was blocked"
            )
        is_training = bool(self.display.iteration) or self.view is not None
        if self.outcome.failure is not None:
            self._tell_failure(self.outcome.failure)
        elif self.outcome.stopped_by == "SIGINT" and is_training:
            when = "before the first logged iteration"
            if self.display.iteration:
                save = flag_value(self.plan.command, "--save")
                load = flag_value(self.plan.command, "--load")
                resuming = to_resume(save, load)
                when = f"at iteration {self.display.iteration}; {resuming}"
            say(f"interrupted {when}; {self._logs}")
        elif self.outcome.stopped_by is not None:
            say(f"stopped by {self.outcome.stopped_by}; {self._logs}")
        else:
            say(f"run {self.plan.run_id} succeeded; {self._logs}")

    def _tell_failure(self, failed: Failure) -> None:
        """Print the failed part's last output, unless the view has shown it, and the cause."""
        reason = str(failed)
        lines = [line for line in failed.tail if line.strip()]
        if self._is_seen:
            # The view does not recognise every error. If a rank was killed by a signal, its last
            # line may be `Killed` or a message from the C library, so always print that line.
            lines = lines[-1:]
        for line in lines:
            is_repeated = self.view is not None and self.view.has_shown(line)
            if not is_repeated and line not in reason:
                say(f"| {line}")
        say(f"failed first: {line_of(reason)}; {self._logs}")
