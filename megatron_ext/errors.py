"""The package's exception hierarchy.

Every message states the value, the rule and the remedy. `UserError` and its subclasses are mistakes
that the user can fix; the command line prints them in one line and exits with code 2. All other
errors are failures of the machine or of upstream and keep their traceback.
"""

from __future__ import annotations

import re
import traceback
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

_MAX_WORD = 200  # characters
_MAX_LINE = 2000  # characters
_LONG_WORD = re.compile(rf"\S{{{_MAX_WORD + 1},}}")


Wording = Callable[[str, str], str]
"""Formats a setting for one kind of reader, given its field or flag and its value (or '')."""

# A setting in a message: `--flag`, or `--flag=value` if the value belongs to it.
_SETTING = re.compile(r"(--[a-z0-9][a-z0-9-]*)(?:=(\S*?)(?=[,;:)]*(?:\s|$)))?")


def in_python(field: str, value: str) -> str:
    """Return a setting as it is written in Python."""
    return f"{field}={value}" if value else field


class _Settings(dict[str, object]):
    """Values for a template; a missing key is treated as the name of a setting."""

    def __init__(self, wording: Wording, values: Mapping[str, object]) -> None:
        super().__init__(values)
        self._wording = wording

    def __missing__(self, field: str) -> _Setting:
        return _Setting(field, self._wording)


class _Setting(NamedTuple):
    """A setting in a template; the format specification is its value (`{transport:tcp}`)."""

    field: str
    wording: Wording

    def __format__(self, value: str) -> str:
        return self.wording(self.field, value)


class MegatronExtError(Exception):
    """Base class of every error that megatron_ext raises deliberately."""

    def __reduce__(self) -> tuple[Callable[..., MegatronExtError], tuple[object, ...]]:
        """Support copy and pickle without calling the constructor, which may not accept `args`."""
        arguments = type(self), self.args, vars(self)
        return _restored, arguments


def _restored(
    cls: type[MegatronExtError],
    args: tuple[object, ...],
    state: Mapping[str, object],
) -> MegatronExtError:
    error = cls.__new__(cls)
    error.args = args
    vars(error).update(state)
    return error


class UserError(MegatronExtError):
    """The user's request is impossible; the message says what would work."""


class ArgumentsError(UserError):
    """Unknown, contradictory or impossible command-line arguments."""


class ConfigurationError(ArgumentsError):
    """A configuration value is invalid, or two values are mutually exclusive.

    Its template refers to settings by field name, in braces and optionally with a value:
    `{transport:torch} cannot run with {dynamic}`. Each reader sees them in familiar terms:
    `transport=torch` in Python, `--pipeline-transport torch` on a command line
    (`megatron_ext.config.flags.in_flags`).
    """

    def __init__(self, template: str, **values: object) -> None:
        """Store the template and the values for its fields, such as `{name.attribute}`."""
        self.template = template
        self.values = values
        super().__init__(self.worded(in_python))

    def worded(self, wording: Wording) -> str:
        """Return the message with settings written the way the reader knows them."""
        settings = _Settings(wording, self.values)
        return self.template.format_map(settings)


class DataError(UserError):
    """A data file, tokenizer or checkpoint is missing, damaged or of the wrong kind."""


class DeviceError(UserError):
    """The requested device backend is not available on this machine or in this build of torch."""


class ScheduleError(UserError):
    """A pipeline schedule is malformed or cannot run with the given sizes."""


class LaunchError(UserError):
    """A job could not be started, or one of its processes exited early."""


class HangError(MegatronExtError):
    """No rank is making progress; the message names the rank that all others are waiting for.

    Args:
        message: Which rank is waiting for which, in order.
        rank: Global rank that all others are waiting for; None if several are waiting for each
            other.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class PatchConflict(MegatronExtError):
    """Two mutually exclusive patches are active on the same target."""


class EffectMissing(MegatronExtError):
    """A requested feature has no effect because Megatron takes a different code path."""


class TransportError(MegatronExtError):
    """A message was not delivered; the error names the peer, the message and the seconds waited."""


class TransportTimeout(TransportError):
    """The peer is alive, but a message did not arrive or was not received in time."""


class PeerDied(TransportError):
    """A peer exited without closing its connection."""


class PeerAborted(TransportError):
    """A peer aborted; the message repeats its reason.

    Args:
        message: Which message could not be delivered, and why.
        reason: Why the first rank gave up, including its number; forwarded unchanged to other
            peers.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class PeerClosed(TransportError):
    """A peer closed its connection cleanly, but too early."""


class MessageMismatch(TransportError):
    """A message's shape or dtype is not what the schedule requires."""


def shortened(text: str, limit: int = _MAX_WORD) -> str:
    """Return the text, with its middle cut out if it is longer than the limit."""
    if len(text) <= limit:
        return text
    half = limit // 2
    beginning = text[:half]
    end = text[-half:]
    return f"{beginning}...({len(text)} characters)...{end}"


def line_of(message: object) -> str:
    """Return a message that is safe to print.

    Long words are shortened and control characters are escaped.
    """
    # Messages quote file names and text from peers, which may contain terminal control sequences.
    words = _LONG_WORD.sub(lambda match: shortened(match[0]), str(message))
    text = shortened(words, _MAX_LINE)
    characters = []
    for character in text:
        if character.isprintable() or character == "\n":
            characters.append(character)
        else:
            in_quotes = repr(character)
            characters.append(in_quotes[1:-1])
    return "".join(characters)


def reworded(message: str, wording: Wording) -> str:
    """Return a message with each `--flag` and `--flag=value` worded for the reader."""

    def worded(match: re.Match[str]) -> str:
        flag, value = match.groups()
        return wording(flag, value or "")

    return _SETTING.sub(worded, message)


# argparse has no error codes, so errors can only be recognised by their text.
_INVALID_VALUE = re.compile(r"argument (.*?): invalid (\w+) value: (.*)")
_INVALID_CHOICE = re.compile(r"argument (.*?): invalid choice: '?(.*?)'? \(choose .*")
_MISSING = re.compile(
    r"(?:the following arguments are required:|one of the arguments) (.*?)(?: is required)?"
)
_UNKNOWN = re.compile(r"unrecognized arguments: (.*)", re.DOTALL)


def parser_line(parser: ArgumentParser, message: str) -> str:
    """Return an argparse error in this package's style, with the closest known name as a hint."""
    see_help = f"see {parser.prog} --help"
    if match := _INVALID_VALUE.fullmatch(message):
        name, kind, value = match.groups()
        remedies = {
            "int": "it must be a whole number",
            "float": "it must be a number",
        }
        return f"{name} is {value}; {remedies.get(kind, see_help)}"
    if match := _INVALID_CHOICE.fullmatch(message):
        name, value = match.groups()
        return _invalid_choice(parser, name, value)
    if match := _MISSING.fullmatch(message):
        names = []
        for spellings in match[1].split(", "):
            first_spelling, _, _ = spellings.partition("/")
            names.append(first_spelling)
        verb = "are" if len(names) > 1 else "is"
        return f"{', '.join(names)} {verb} missing; {see_help}"
    if match := _UNKNOWN.fullmatch(message):
        words = match[1].split()
        return _unknown_arguments(parser, words, see_help)
    # Show any other text unchanged: a newer Python may word its errors differently.
    return f"{message.removeprefix('argument ')}; {see_help}"


def _invalid_choice(parser: ArgumentParser, name: str, value: str) -> str:
    """Return the error for a value that is not one of an argument's choices."""
    choices: list[str] = []
    for action in parser._actions:
        # argparse identifies an argument by its flags, or else by its metavar or
        # destination.
        names = ["/".join(action.option_strings), *action.option_strings]
        names.append(str(action.metavar or action.dest))
        if name in names:
            for choice in action.choices or ():
                # An enumeration's members are shown by name.
                text = getattr(choice, "name", choice)
                choices.append(str(text))
            break
    close = get_close_matches(value, choices, n=1)
    if close:
        hint = f"did you mean {close[0]}?"
    else:
        hint = f"use one of {', '.join(choices)}"
    kind = f"value of {name}"
    if name in ("COMMAND", "ACTION"):
        kind = "command"
    return f"{value!r} is not a {kind}; {hint}"


def _unknown_arguments(parser: ArgumentParser, words: list[str], see_help: str) -> str:
    """Return the error for unknown arguments, suggesting the closest flag for each."""
    flags: list[str] = []
    for action in parser._actions:
        flags += action.option_strings
    unknown = []
    for word in words:
        if word.startswith("--"):
            flag, _, _ = word.partition("=")
            unknown.append(flag)
    if not unknown:
        unknown = words[:1]
    lines: list[str] = []
    strange: list[str] = []
    for word in dict.fromkeys(unknown):
        close = get_close_matches(word, flags, n=1)
        if close:
            lines.append(f"unknown argument {word}; did you mean {close[0]}?")
        else:
            strange.append(word)
    if strange:
        plural = "s" if len(strange) > 1 else ""
        lines.append(f"unknown argument{plural} {', '.join(strange)}; {see_help}")
    return " ".join(lines)


def message_of(error: BaseException) -> str:
    """Return an error's message, or the source line that raised it if the message is empty.

    An arithmetic error gets both, because its message alone does not identify the operands.
    """
    place = traceback.extract_tb(error.__traceback__)[-1]
    file_name = Path(place.filename).name
    line = f"{place.line} ({file_name}:{place.lineno})"
    if isinstance(error, ArithmeticError):
        return f"{error}: {line}"
    return str(error) or line


def reason_of(error: BaseException) -> str:
    """Return the reason for a failure in one short line, even if the error has no text."""
    if isinstance(error, EOFError):
        return "it is truncated"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    for line in str(error).splitlines():
        if line.strip():
            return shortened(line.strip())
    return type(error).__name__


def reason_for_peers(error: BaseException) -> str:
    """Return why this rank is giving up, worded for its peers: the first rank's reason if known."""
    if isinstance(error, PeerAborted) and error.reason:
        return error.reason
    if isinstance(error, MegatronExtError):
        return str(error)
    name = type(error).__name__
    if not str(error):
        return name
    return f"{name}: {error}"


class UpstreamMismatch(MegatronExtError):
    """The installed Megatron differs from the release that a patch was written for.

    The target is `module:attribute.path`; `expected` and `actual` are, for example, signatures.
    """

    def __init__(
        self,
        target: str,
        *,
        expected: str,
        actual: str,
        installed: str,
        supported: str,
        remedy: str,
    ) -> None:
        self.target = target
        self.actual = actual
        super().__init__(
            f"{target}: expected {expected}, found {actual}; Megatron {installed} is installed, "
            f"{supported} is supported. {remedy}."
        )
