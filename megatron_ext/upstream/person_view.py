"""A person's view of a training log: some lines on the start, then a short one per logged step.

    torchrun ... 2>&1 | python -m megatron_ext.upstream.person_view --log all.txt

Megatron's own lines stay as they are, because programs read them; this reads them too, and needs
the standard library alone. Warnings that matter and errors are passed on, once each.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

_STEP = re.compile(r"iteration\s+(\d+)/\s*(\d+) \|(.*)")
_VALIDATION = re.compile(r"validation loss at iteration (\d+)(?: on (\w+) set)? \| (.*)")
_TESTED = re.compile(r"(\w[\w ]*) value: (\S+) \|")
_WORLD = re.compile(r"using world size: (\d+), (.*)")
# torchrun runs Python unbuffered, where a line and its end are two writes: two ranks can share one.
_PARAMETERS = re.compile(r"> number of parameters on [^>]* rank (\([\d, ]+\)): (\d+)")
_SEQ_LENGTH = re.compile(r"  seq_length \.+ (\d+)")
_BUBBLE = re.compile(r"pipeline: bubble ([\d.]+) %")
_OURS = re.compile(r"(?:\[rank \d+\] )?megatron_ext(?:: |\s+runs )")
_WARNING = re.compile(r"WARNING[: ]|.*?:\d+: \w*Warning: |\S*: ?warning: ", re.IGNORECASE)
# What precedes the text of a warning: the place in Megatron that raised it.
_WARNED_AT = re.compile(r"^(?:WARNING:?\s?(?:[\w.]+:)?|.*?:\d+: \w*Warning: )")
# Lines of Megatron's loggers about what it goes on from, or ends with: a loss that is NaN.
_LOGGED_ERROR = re.compile(r"(?:ERROR|CRITICAL)[: ](?:[\w.]+:)?\s*")
_ERROR = re.compile(r"\w[\w.]*(?:Error|Exception|Interrupt|Exit|Mismatch|Died|Timeout)\b(?:: |$)")
_TORCHRUN = re.compile(r"[EWI]\d{4} [\d:.]+ \d+ torch/distributed/(?:elastic|run)")

# torch's mark before each line of a traceback, once ranks are connected.
_RANK = re.compile(r"\[rank\d+\]: ")

# Errors with which torchrun ends if a rank fails, or at Ctrl-C.
_LAUNCHER = ("ChildFailedError", "SignalException")

# What a machine lacks on purpose, what a first run cannot have, and Megatron's notes to itself.
_HARMLESS = re.compile(
    r"apex|transformer[ _-]engine|pin_memory|one_logger|legacy tokenizer|GPTModel IS DEPRECATED"
    r"|RerunStateMachine|Result validation|path_to_cache is None|metadata file"
    r"|Overriding default arguments|optimized fused softmax|is experimental|FutureWarning"
    r"|DeprecationWarning|triton|nvidia_resiliency|flash.attn|OMP_NUM_THREADS"
    r"|args.overlap_p2p_comm and args.align_param_gather|async save is deprecated",
    re.IGNORECASE,
)
# Lines of Megatron's that become one short line, at the first time.
_STAGES = (
    (r"> initializing torch distributed", "connecting the ranks"),
    (r"building \w+ model", "building the model"),
    (r"loading checkpoint from", "loading the checkpoint"),
    (
        r"successfully loaded checkpoint from (.+?)(?: \[.*\])? at iteration\s+(\d+)$",
        "continues from iteration {1} of {0}",
    ),
    (r"> building train, validation, and test datasets", "preparing the data"),
    (
        r"successfully saved checkpoint from iteration\s+(\d+) to (.+?)(?: \[.*)?$",
        "saved iteration {0} to {1}",
    ),
    (r"exiting program (?:at|after) ([^\]]*)", "stops after {0}"),
)


def _number(text: str) -> str:
    """Return a number of the log in few digits, for example 4.8553 of 4.855259E+00."""
    value = float(text)
    return f"{value:.4f}" if 0.01 <= abs(value) < 1000 else f"{value:.4g}"


def _loss(name: str) -> str:
    return "loss" if name == "lm loss" else name


@dataclass
class PersonView:
    """The short form of one training's log, line by line.

    Lines of several processes may be mixed, but each line is whole; `source` keeps their tracebacks
    apart where it is known.
    """

    seq_length: int | None = None
    """Tokens of a sample; None: the log's list of arguments has it."""
    failed: bool = False
    """Whether an error has been shown."""
    _bubble: str | None = None
    _parameters: dict[str, int] = field(default_factory=dict)
    _shown: set[str] = field(default_factory=set)
    _tracebacks: dict[str, list[str]] = field(default_factory=dict)
    _after_error: dict[str, bool] = field(default_factory=dict)
    """By source: whether torch marks the error that was shown last, and may have further lines."""

    def feed(self, line: str, source: str = "") -> list[str]:
        """Return the lines to show for a line of the log: mostly none."""
        # Only torch marks lines so: what follows with the same mark belongs to the error.
        is_marked = _RANK.match(line) is not None
        line = _RANK.sub("", line.rstrip())
        if line.startswith("Traceback (most recent call last)"):
            self._tracebacks[source] = [line]
            self._after_error[source] = is_marked
            return []
        # A step is another process's, or the error ended nothing and its last line is not known.
        if source in self._tracebacks and not _STEP.search(line):
            return self._traceback(line, source)
        if shown := self._recognized(line):
            self._after_error.pop(source, None)
            return shown
        # The rest of a message of several lines; lines of the log may arrive after it.
        if self._after_error.get(source) == is_marked and line and not _TORCHRUN.match(line):
            return [line]
        return []

    def flush(self) -> list[str]:
        """Return tracebacks whose last line was not recognized, of equal ones the first."""
        cut = {_without_numbers("\n".join(lines)): lines for lines in self._tracebacks.values()}
        self._tracebacks.clear()
        lines = [line for one in cut.values() for line in one]
        self._shown.update(lines)
        return lines

    def _traceback(self, line: str, source: str) -> list[str]:
        lines = self._tracebacks[source]
        lines.append(line)
        # Lines of a traceback are indented; the error ends it.
        if not line or line[0].isspace() or not _ERROR.match(line):
            return []
        del self._tracebacks[source]
        # torchrun's own report adds nothing to an error of a rank, but is all there is on a kill.
        is_launchers = any(name in line for name in _LAUNCHER)
        if (is_launchers and self.failed) or not self._once(_without_numbers(line)):
            self._after_error.pop(source, None)
            return []
        self.failed = True
        return lines

    def has_shown(self, line: str) -> bool:
        """Return whether a line, or one that differs in numbers alone, has been shown."""
        line = _RANK.sub("", line)
        return line in self._shown or _without_numbers(line) in self._shown

    def _recognized(self, line: str) -> list[str]:
        if found := _STEP.search(line):
            with suppress(ValueError):  # a line of the script's own, with words for numbers
                return [self._step(*found.groups())]
            return [line.strip()]
        if found := _VALIDATION.search(line):
            values = "  ".join(
                f"{_loss(name)} {_number(value)}" for name, value in _TESTED.findall(found[3])
            )
            return [f"{found[2] or 'validation'} at iteration {found[1]}: {values}"]
        # Numbers that later lines show.
        if found := _BUBBLE.search(line):
            self._bubble = found[1]
            return []
        if found := _SEQ_LENGTH.match(line):
            self.seq_length = self.seq_length or int(found[1])
            return []
        if counts := _PARAMETERS.findall(line):
            self._parameters |= {rank: int(count) for rank, count in counts}
            return []
        if _OURS.match(line):
            self.failed = self.failed or "error: " in line
            return self._once(line)
        if _WARNING.match(line):
            if _HARMLESS.search(line):
                return []
            return self._once(f"warning: {_WARNED_AT.sub('', line).strip()}")
        if logged := _LOGGED_ERROR.match(line):
            # Once for all ranks, micro-batches and iterations that have it.
            if not self._once(_without_numbers(line)):
                return []
            return [f"error: {line[logged.end() :]}"]
        return self._stage(line)

    def _stage(self, line: str) -> list[str]:
        if found := _WORLD.search(line):
            sizes = re.findall(r"([a-z -]+?)(?:-model)?-parallel size: (\d+)", found[2])
            split = [f"{name.strip()} {size}" for name, size in sizes if size != "1"]
            return self._once(", ".join([f"{found[1]} ranks", *split]))
        if "[before the start of training step]" in line:
            total = sum(self._parameters.values()) / 1e6
            return self._once(f"training {total:,.1f} million parameters" if total else "training")
        for pattern, shown in _STAGES:
            if found := re.search(pattern, line):
                return self._once(shown.format(*found.groups()))
        return []

    def _once(self, line: str) -> list[str]:
        known = line in self._shown
        self._shown.add(line)
        return [] if known else [line]

    def _step(self, iteration: str, last: str, rest: str) -> str:
        fields = dict(one.strip().split(": ", 1) for one in rest.split("|") if ": " in one)
        parts = [f"iteration {iteration:>{len(last)}}/{last}"]
        for name, value in fields.items():
            if name.endswith("loss"):
                parts.append(f"{_loss(name)} {_number(value)}")
        if "grad norm" in fields:
            parts.append(f"gradient norm {_number(fields['grad norm'])}")
        elapsed_ms = float(fields.get("elapsed time per iteration (ms)", "0"))
        if elapsed_ms:
            parts.append(f"{elapsed_ms:,.0f} ms")
            if self.seq_length and "global batch size" in fields:
                tokens = int(fields["global batch size"]) * self.seq_length
                parts.append(f"{1000 * tokens / elapsed_ms:,.0f} tokens/s")
        for name, short in (
            ("throughput per GPU (TFLOP/s/GPU)", "TFLOP/s per GPU"),
            ("number of skipped iterations", "skipped"),
            ("number of nan iterations", "with NaN"),
        ):
            if float(fields.get(name, "0")):
                parts.append(f"{fields[name].strip()} {short}")
        if self._bubble is not None:
            parts.append(f"bubble {self._bubble} %")
            self._bubble = None
        return "  ".join(parts)


def _without_numbers(line: str) -> str:
    # Ranks, process ids and ports differ between equal lines.
    return re.sub(r"\d+", "#", line)


def main(argv: list[str] | None = None) -> int:
    """Show standard input in short form; `--log FILE` keeps all of it, `--raw` shows all of it."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_ext.upstream.person_view", description=main.__doc__
    )
    parser.add_argument("--log", type=Path, metavar="FILE", help="write every line to FILE")
    parser.add_argument("--raw", action="store_true", help="show every line as it is")
    options = parser.parse_args(argv)
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    # Ctrl-C goes to the whole process group. The last lines of the training are kept, and not
    # shown: how a launcher and its ranks end then is of no interest.
    signal.signal(signal.SIGINT, stop)
    view = PersonView()
    kept = options.log.open("w", encoding="utf-8") if options.log else nullcontext()
    with kept as log:
        for raw in sys.stdin.buffer:
            line = raw.decode(errors="replace")
            if log is not None:
                log.write(line)
                log.flush()
            for one in [line.rstrip("\n")] if options.raw else view.feed(line):
                if options.raw or not stopped:
                    print(one, flush=True)
        for one in () if stopped else view.flush():
            print(one, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
