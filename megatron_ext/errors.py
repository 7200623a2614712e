"""The exception tree of the package.

Every message gives the value, the rule and the remedy. `UserError` and its subclasses are mistakes
that the user can fix; the command line prints them in one line and exits with code 2. The others
are failures of the machine or of upstream, and keep their traceback.
"""

from __future__ import annotations

import re
import traceback
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

_MAX_WORD = 200
_MAX_LINE = 2000


Wording = Callable[[str, str], str]
"""Says a setting for one kind of reader: of its field and its value, which may be empty."""


def in_python(field: str, value: str) -> str:
    """Return a setting as a program gives it."""
    return f"{field}={value}" if value else field


class _Settings(dict[str, object]):
    """What a template names: given values, and any setting in a reader's words."""

    def __init__(self, wording: Wording, values: Mapping[str, object]) -> None:
        super().__init__(values)
        self._wording = wording

    def __missing__(self, field: str) -> _Setting:
        return _Setting(field, self._wording)


class _Setting(NamedTuple):
    """A setting, which is formatted with its value as the format."""

    field: str
    wording: Wording

    def __format__(self, value: str) -> str:
        return self.wording(self.field, value)


class MegatronExtError(Exception):
    """Base of every error that megatron_ext raises on purpose."""


class UserError(MegatronExtError):
    """A request of the user is impossible; the message says what would work."""


class ArgumentsError(UserError):
    """Unknown, contradictory or impossible command-line arguments."""


class ConfigurationError(ArgumentsError):
    """A value of a configuration is impossible, or two values exclude each other.

    Its template names settings by their fields, in braces and perhaps with a value:
    `{slices:4} cannot run with {pairs}`. Each reader gets them in words of its own: `slices=4` in
    Python, `--pipeline-slices 4` on a command line (`megatron_ext.config.flags.in_flags`).
    """

    def __init__(self, template: str, **values: object) -> None:
        """Keep the template; values by name are for `{name.attribute}` in it."""
        self.template = template
        self.values = values
        super().__init__(self.worded(in_python))

    def worded(self, wording: Wording) -> str:
        """Return the message with its settings in a reader's words."""
        return self.template.format_map(_Settings(wording, self.values))


class DataError(UserError):
    """A data file, tokenizer or checkpoint is missing, damaged or of another kind than expected."""


class DeviceError(UserError):
    """The requested device backend is not available on this machine or in this torch."""


class ScheduleError(UserError):
    """A pipeline schedule is malformed or cannot run with the given sizes."""


class LaunchError(UserError):
    """A job could not be started, or one of its processes exited early."""


class HangError(MegatronExtError):
    """No rank makes progress; the message names the one that the others wait for.

    Args:
        message: The waits, from one rank to the next.
        rank: Global rank of that one; None if several wait for each other.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class PatchConflict(MegatronExtError):
    """Two patches that exclude each other are active on one target."""


class EffectMissing(MegatronExtError):
    """A requested feature has no effect, because Megatron takes another code path."""


class TransportError(MegatronExtError):
    """A message could not be carried; names the peer, the message and the seconds waited."""


class TransportTimeout(TransportError):
    """A peer is there, but a message did not come, or was not taken, in time."""


class PeerDied(TransportError):
    """A peer exited without closing its connection."""


class PeerAborted(TransportError):
    """A peer aborted; the message repeats its reason.

    Args:
        message: What could not be carried, and why.
        reason: Why the first rank gave up, with its number: what further peers are told.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class PeerClosed(TransportError):
    """A peer closed its connection in order, but too early."""


class MessageMismatch(TransportError):
    """The shape or dtype of a message differs from the schedule."""


def shortened(text: str, limit: int = _MAX_WORD) -> str:
    """Return the text, with its middle left out if it exceeds the limit of characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}...({len(text)} characters)...{text[-half:]}"


def line_of(message: object) -> str:
    """Return a message in printable form, whatever its parts contain.

    Shortens long words, and escapes control characters of terminals.
    """
    # Messages quote names of files and words of peers, which may hold what a terminal would obey.
    words = re.sub(rf"\S{{{_MAX_WORD + 1},}}", lambda match: shortened(match[0]), str(message))
    text = shortened(words, _MAX_LINE)
    return "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text)


def reworded(message: str, name_of: Callable[[str], str]) -> str:
    """Return a message about flags with the names that a reader without a command line knows."""
    return re.sub(r"--[a-z0-9][a-z0-9-]*", lambda flag: name_of(flag[0]), message)


def parser_line(parser: ArgumentParser, message: str) -> str:
    """Return an error of argparse in our own words, with a known name that is close."""
    # argparse has no codes for its errors, only text. What is not recognised, as after a change in
    # another Python, is shown as it is.
    see = f"see {parser.prog} --help"
    if found := re.fullmatch(r"argument (.*?): invalid (\w+) value: (.*)", message):
        kinds = {"int": "it must be a whole number", "float": "it must be a number"}
        return f"{found[1]} is {found[3]}; {kinds.get(found[2], see)}"
    if found := re.fullmatch(r"argument (.*?): invalid choice: '?(.*?)'? \(choose .*", message):
        # argparse names an argument by its flags, else by its metavar, else by its destination.
        action = next(
            one
            for one in parser._actions
            if found[1]
            in ("/".join(one.option_strings), *one.option_strings, one.metavar or one.dest)
        )
        known = [str(getattr(choice, "name", choice)) for choice in action.choices or ()]
        like = get_close_matches(found[2], known, 1)
        hint = f"did you mean {like[0]}?" if like else f"use one of {', '.join(known)}"
        what = "command" if found[1] in ("COMMAND", "ACTION") else f"value of {found[1]}"
        return f"{found[2]!r} is not a {what}; {hint}"
    if found := re.fullmatch(
        r"(?:the following arguments are required:|one of the arguments) (.*?)( is required)?",
        message,
    ):
        names = [name.partition("/")[0] for name in found[1].split(", ")]
        return f"{', '.join(names)} {'are' if len(names) > 1 else 'is'} missing; {see}"
    if message.startswith("unrecognized arguments: "):
        words = message.removeprefix("unrecognized arguments: ").split()
        flags = [flag for one in parser._actions for flag in one.option_strings]
        unknown = [word.partition("=")[0] for word in words if word.startswith("--")] or words[:1]
        near = {word: get_close_matches(word, flags, 1) for word in dict.fromkeys(unknown)}
        lines = [
            f"unknown argument {word}; did you mean {like[0]}?"
            for word, like in near.items()
            if like
        ]
        if strange := [word for word in near if not near[word]]:
            lines.append(f"unknown argument{'s' * (len(strange) > 1)} {', '.join(strange)}; {see}")
        return " ".join(lines)
    return f"{message.removeprefix('argument ')}; {see}"


def message_of(error: BaseException) -> str:
    """Return an error's message, or the line that raised it if it has none.

    A division by zero gets both, because its message alone says too little.
    """
    place = traceback.extract_tb(error.__traceback__)[-1]
    line = f"{place.line} ({Path(place.filename).name}:{place.lineno})"
    if isinstance(error, ArithmeticError):
        return f"{error}: {line}"
    return str(error) or line


def reason_of(error: BaseException) -> str:
    """Return the reason of a failure in one short line, even if the error has no text."""
    if isinstance(error, EOFError):
        return "it ends too early"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return shortened(first.strip()) or type(error).__name__


def reason_for_peers(error: BaseException) -> str:
    """Return why this rank gives up, for its peers: the first rank's reason if that is another."""
    if isinstance(error, PeerAborted) and error.reason:
        return error.reason
    if isinstance(error, MegatronExtError):
        return str(error)
    name = type(error).__name__
    return f"{name}: {error}" if str(error) else name


class UpstreamMismatch(MegatronExtError):
    """The installed Megatron is not the one that a patch was written for.

    The target is `module:attribute.path`; `expected` and `found` are signatures or the like.
    """

    def __init__(
        self, target: str, *, expected: str, found: str, installed: str, supported: str, remedy: str
    ) -> None:
        self.target = target
        self.found = found
        super().__init__(
            f"{target}: expected {expected}, found {found}; Megatron {installed} is installed, "
            f"{supported} is supported. {remedy}."
        )
