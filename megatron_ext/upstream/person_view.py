"""A short view of a training log: a few lines about the start, then one line per logged step.

    torchrun ... 2>&1 | python -m megatron_ext.upstream.person_view --log all.txt

Other programs read Megatron's log lines, so the job itself does not change them. This module
shortens them for people, and shows each error and each relevant warning once. It needs only the
standard library.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

_STEP = re.compile(r"iteration\s+(\d+)/\s*(\d+) \|(.*)")
_VALUE = re.compile(r"(\w[\w ]*) value: (\S+) \|")
_PARALLEL_SIZE = re.compile(r"([a-z -]+?)(?:-model)?-parallel size: (\d+)")
# torchrun runs Python unbuffered, so a line and its newline are two writes. The lines
# of two ranks may therefore merge, and one line may match this several times.
_PARAMETERS = re.compile(r"> number of parameters on [^>]* rank (\([\d, ]+\)): (\d+)")
# Warnings about optional packages, warnings about files that do not exist yet on a
# first run, and Megatron's internal notes.
_HARMLESS = re.compile(
    r"apex|transformer[ _-]engine|pin_memory|one_logger|legacy tokenizer|GPTModel IS DEPRECATED"
    r"|RerunStateMachine|Result validation|path_to_cache is None|metadata file"
    r"|Overriding default arguments|optimized fused softmax|is experimental|FutureWarning"
    r"|DeprecationWarning|triton|nvidia_resiliency|flash.attn|OMP_NUM_THREADS"
    r"|args.overlap_p2p_comm and args.align_param_gather|async save is deprecated",
    re.IGNORECASE,
)
_LAST_OF_TRACEBACK = re.compile(
    r"\w[\w.]*(?:Error|Exception|Interrupt|Exit|Mismatch|Died|Timeout)\b(?:: |$)"
)
# The prefix that torch adds to each line of a traceback, once ranks are connected.
_RANK = re.compile(r"\[rank\d+\]: ")
_TORCHRUNS_LOG = re.compile(r"[EWI]\d{4} [\d:.]+ \d+ torch/distributed/(?:elastic|run)")
_TORCHRUNS_ERRORS = ("ChildFailedError", "SignalException")
"""Errors that torchrun itself raises when a rank fails, or after Ctrl-C."""


@dataclass
class PersonView:
    """Shortens the log of one training run, line by line.

    Lines from several processes may be interleaved, but each line is complete. `source` separates
    the tracebacks of these processes if the caller knows it.
    """

    failed: bool = False
    """Whether an error has been shown."""
    _seq_length: int | None = None
    """Number of tokens in a sample."""
    _bubble: str | None = None
    """Percentage of idle time in the step whose line comes next."""
    _parameters: dict[str, int] = field(default_factory=dict)
    """Model-parallel rank -> number of parameters."""
    _shown: set[str] = field(default_factory=set)
    _tracebacks: dict[str, list[str]] = field(default_factory=dict)
    """Source -> the lines of a traceback whose last line has not arrived yet."""
    _after_error: dict[str, bool] = field(default_factory=dict)
    """Source -> whether torch prefixed the last error shown, whose message may have more lines."""

    def feed(self, line: str, source: str = "") -> list[str]:
        """Return the lines to show for a line of the log, usually none."""
        # Only torch adds this prefix, so the following lines with the prefix belong to
        # the error.
        is_marked = _RANK.match(line) is not None
        line = _RANK.sub("", line.rstrip())
        if line.startswith("Traceback (most recent call last)"):
            self._tracebacks[source] = [line]
            self._after_error[source] = is_marked
            return []
        # A step line does not belong to the traceback: it comes from another process, or the error
        # was not fatal and its last line was not recognised.
        if source in self._tracebacks and not _STEP.search(line):
            return self._traceback(line, source)
        if shown := self._recognized(line):
            self._after_error.pop(source, None)
            return shown
        # The line may continue the message of the last error. Without torch's prefix, it may also
        # be an ordinary log line, and the two cannot be told apart.
        continues_error = self._after_error.get(source) == is_marked
        if continues_error and line and not _TORCHRUNS_LOG.match(line):
            return [line]
        return []

    def flush(self) -> list[str]:
        """Return the tracebacks whose last line was not recognised, without duplicates."""
        unfinished: dict[str, list[str]] = {}
        for lines in self._tracebacks.values():
            text = _numberless("\n".join(lines))
            unfinished[text] = lines
        self._tracebacks.clear()
        shown: list[str] = []
        for lines in unfinished.values():
            shown += lines
        self._shown.update(shown)
        return shown

    def has_shown(self, line: str) -> bool:
        """Return whether a line, or one that differs only in its numbers, has been shown."""
        line = _RANK.sub("", line)
        return line in self._shown or _numberless(line) in self._shown

    def _traceback(self, line: str, source: str) -> list[str]:
        lines = self._tracebacks[source]
        lines.append(line)
        is_indented = line[:1].strip() == ""
        if is_indented or not _LAST_OF_TRACEBACK.match(line):
            return []
        del self._tracebacks[source]
        # torchrun's report adds nothing to a rank's error, but it is the only error if a rank is
        # killed.
        is_torchruns = any(name in line for name in _TORCHRUNS_ERRORS)
        is_redundant = is_torchruns and self.failed
        if is_redundant or not self._once(_numberless(line)):
            self._after_error.pop(source, None)
            return []
        self.failed = True
        return lines

    def _recognized(self, line: str) -> list[str]:
        for pattern, show in _FORMS.items():
            if match := re.search(pattern, line):
                return show(self, match)
        return []

    def _once(self, line: str) -> list[str]:
        if line in self._shown:
            return []
        self._shown.add(line)
        return [line]

    # One method for each pattern in `_FORMS`.

    def _step(self, match: re.Match[str]) -> list[str]:
        iteration, last, text = match.groups()
        fields: dict[str, str] = {}
        for part in text.split("|"):
            name, separator, value = part.strip().partition(": ")
            if separator:
                fields[name] = value
        width = len(last)
        parts = [f"iteration {iteration:>{width}}/{last}"]
        try:
            parts += self._numbers_of_step(fields)
        except ValueError:  # the script's own line, with words instead of numbers
            line = match.string[match.start() :]
            return [line.strip()]
        if self._bubble is not None:
            parts.append(f"bubble {self._bubble} %")
            self._bubble = None
        return ["  ".join(parts)]

    def _numbers_of_step(self, fields: dict[str, str]) -> list[str]:
        parts = []
        for name, value in fields.items():
            if name.endswith("loss"):
                parts.append(_loss(name, value))
        if "grad norm" in fields:
            parts.append(f"gradient norm {_number(fields['grad norm'])}")
        elapsed_ms = float(fields.get("elapsed time per iteration (ms)", "0"))
        if elapsed_ms:
            parts.append(f"{elapsed_ms:,.0f} ms")
        if elapsed_ms and self._seq_length and "global batch size" in fields:
            num_samples = int(fields["global batch size"])
            num_tokens = num_samples * self._seq_length
            parts.append(f"{1000 * num_tokens / elapsed_ms:,.0f} tokens/s")
        for name, short in (
            ("throughput per GPU (TFLOP/s/GPU)", "TFLOP/s per GPU"),
            ("number of skipped iterations", "skipped"),
            ("number of nan iterations", "with NaN"),
        ):
            if float(fields.get(name, "0")):
                parts.append(f"{fields[name].strip()} {short}")
        return parts

    def _validation(self, match: re.Match[str]) -> list[str]:
        iteration, split, text = match.groups()
        losses = [_loss(name, value) for name, value in _VALUE.findall(text)]
        return [
            f"{split or 'validation'} at iteration {iteration}: {'  '.join(losses)}"
        ]

    def _note_bubble(self, match: re.Match[str]) -> list[str]:
        self._bubble = match[1]
        return []

    def _note_seq_length(self, match: re.Match[str]) -> list[str]:
        self._seq_length = self._seq_length or int(match[1])
        return []

    def _note_parameters(self, match: re.Match[str]) -> list[str]:
        for rank, count in _PARAMETERS.findall(match.string):
            self._parameters[rank] = int(count)
        return []

    def _ours(self, match: re.Match[str]) -> list[str]:
        self.failed = self.failed or "error: " in match.string
        return self._once(match.string)

    def _warning(self, match: re.Match[str]) -> list[str]:
        if _HARMLESS.search(match.string):
            return []
        return self._once(f"warning: {match[1].strip()}")

    def _error(self, match: re.Match[str]) -> list[str]:
        # Show an error once for all ranks, micro-batches and iterations that report it.
        if not self._once(_numberless(match.string)):
            return []
        return [f"error: {match[1].strip()}"]

    def _world(self, match: re.Match[str]) -> list[str]:
        parts = [f"{match[1]} ranks"]
        for name, size in _PARALLEL_SIZE.findall(match[2]):
            if size != "1":
                parts.append(f"{name.strip()} {size}")
        return self._once(", ".join(parts))

    def _training(self, _match: re.Match[str]) -> list[str]:
        num_parameters = sum(self._parameters.values())
        if num_parameters == 0:
            return self._once("training")
        return self._once(f"training {num_parameters / 1e6:,.1f} million parameters")

    def _stage(self, match: re.Match[str]) -> list[str]:
        template = _STAGES[match.re.pattern]
        text = template.format(*match.groups())
        return self._once(text)


# Megatron's lines that are shown in short form when they first appear.
_STAGES = {
    r"> initializing torch distributed": "connecting the ranks",
    r"building \w+ model": "building the model",
    r"loading checkpoint from": "loading the checkpoint",
    r"successfully loaded checkpoint from (.+?)(?: \[.*\])? at iteration\s+(\d+)$": (
        "continues from iteration {1} of {0}"
    ),
    r"> building train, validation, and test datasets": "preparing the data",
    # Saving a large checkpoint takes minutes, during which Megatron logs nothing else.
    r"saving checkpoint at iteration\s+(\d+) to": "saving iteration {0}",
    r"successfully saved checkpoint from iteration\s+(\d+) to (.+?)(?: \[.*)?$": (
        "saved iteration {0} to {1}"
    ),
    r"exiting program (?:at|after) ([^\]]*)": "stops after {0}",
}
_FORMS = {
    _STEP.pattern: PersonView._step,
    r"validation loss at iteration (\d+)(?: on (\w+) set)? \| (.*)": PersonView._validation,
    r"pipeline: bubble ([\d.]+) %": PersonView._note_bubble,
    r"^  seq_length \.+ (\d+)": PersonView._note_seq_length,
    _PARAMETERS.pattern: PersonView._note_parameters,
    r"^(?:\[rank \d+\] )?megatron_ext(?:: |\s+runs )": PersonView._ours,
    # Omit the logger's name, or the place in Megatron that issues the warning.
    r"(?i)^WARNING[: ]\s?(?:[\w.]+:)?(.*)": PersonView._warning,
    r"(?i)^.*?:\d+: \w*Warning: (.*)": PersonView._warning,
    r"(?i)^(\S*: ?warning: .*)": PersonView._warning,
    r"^(?:ERROR|CRITICAL)[: ]\s?(?:[\w.]+:)?(.*)": PersonView._error,
    r"using world size: (\d+), (.*)": PersonView._world,
    r"\[before the start of training step\]": PersonView._training,
    **dict.fromkeys(_STAGES, PersonView._stage),
}
"""Pattern of a log line -> the method that shows it. The first match wins."""


def _number(text: str) -> str:
    """Return a number from the log with fewer digits, for example 4.8553 for 4.855259E+00."""
    value = float(text)
    if 0.01 <= abs(value) < 1000:
        return f"{value:.4f}"
    return f"{value:.4g}"


def _loss(name: str, value: str) -> str:
    if name == "lm loss":
        name = "loss"
    return f"{name} {_number(value)}"


def _numberless(text: str) -> str:
    # Ranks, process ids and ports differ between otherwise identical lines.
    return re.sub(r"\d+", "#", text)


def main(argv: list[str] | None = None) -> int:
    """Show standard input in short form; `--log FILE` keeps every line and `--raw` shows them."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_ext.upstream.person_view",
        description=main.__doc__,
    )
    parser.add_argument(
        "--log",
        type=Path,
        metavar="FILE",
        help="write every line to FILE",
    )
    parser.add_argument(
        "--raw",
        action="store_true",
        help="show every line unchanged",
    )
    options = parser.parse_args(argv)
    is_stopped = False

    def stop(*_: object) -> None:
        nonlocal is_stopped
        is_stopped = True

    # Ctrl-C reaches the whole process group. Write the training run's last lines to the
    # file but do not show them: after Ctrl-C, users do not care how the launcher and
    # its ranks exit.
    signal.signal(signal.SIGINT, stop)
    view = PersonView()
    log_file: AbstractContextManager[TextIO | None] = nullcontext()
    if options.log:
        log_file = options.log.open("w", encoding="utf-8")
    with log_file as log:
        for data in sys.stdin.buffer:
            line = data.decode(errors="replace")
            if log is not None:
                log.write(line)
                log.flush()
            if options.raw:
                shown = [line.rstrip("\n")]
            else:
                shown = view.feed(line)
            if shown and (options.raw or not is_stopped):
                print("\n".join(shown), flush=True)
    if not is_stopped:
        for line in view.flush():
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
