"""One exception tree for everything the package can refuse or fail at.

Every message gives the value, the rule and the remedy. `UserError` and its children are mistakes
that the user can mend; the command line prints them in one line and exits with code 2. The others
are failures of the machine or of upstream, and keep their traceback.
"""

from __future__ import annotations

import re
import time

__all__ = [
    "ArgumentsError",
    "DataError",
    "DeviceError",
    "EffectMissing",
    "HangError",
    "LaunchError",
    "MegatronExtError",
    "MessageMismatch",
    "PatchConflict",
    "PeerAborted",
    "PeerClosed",
    "PeerDied",
    "ScheduleError",
    "TransportError",
    "TransportTimeout",
    "UpstreamMismatch",
    "UserError",
    "leave_telling_to_another",
    "line_of",
    "reason_of",
    "shortened",
]

TELLING_S = 2.0
"""How long a process stays that fails for a reason that another one tells."""

_MAX_WORD = 200
_MAX_LINE = 2000


class MegatronExtError(Exception):
    """Base of every error that megatron_ext raises on purpose."""


class UserError(MegatronExtError):
    """Something the user asked for cannot be done; the message says what would work."""


class ArgumentsError(UserError):
    """Unknown, contradictory or impossible command-line arguments."""


class DataError(UserError):
    """A data file, tokenizer or checkpoint is missing, damaged or of another kind than expected."""


class DeviceError(UserError):
    """A device backend was asked for that this machine or this torch does not have."""


class ScheduleError(UserError):
    """A pipeline schedule is malformed or cannot run with the given sizes."""


class LaunchError(UserError):
    """A job could not be started as asked, or one of its processes ended before its time."""


class HangError(MegatronExtError):
    """No rank makes progress any more; names the one that the others wait for."""


class PatchConflict(MegatronExtError):
    """Two patches that exclude each other are active on one target."""


class EffectMissing(MegatronExtError):
    """A feature that was asked for does not do what it is for: Megatron goes another way.

    Args:
        feature: What the user asked for.
        effect: What has to be so.
        found: What is so instead.
        patch: Id of the patch that should have acted.
        installed: Version of Megatron.
        tested: The version that the feature was tested with.
    """

    def __init__(
        self, feature: str, effect: str, found: str, patch: str, *, installed: str, tested: str
    ) -> None:
        self.feature = feature
        self.effect = effect
        self.patch = patch
        super().__init__(
            f"{feature}: {effect}, but {found}; the patch {patch} should have seen to it (see "
            f"`megatron-ext patches list`). Megatron {installed} is installed; leave {feature} "
            f"out, or take the version that it was tested with: pip install megatron-core=={tested}"
        )


class TransportError(MegatronExtError):
    """A message could not be carried; names the peer, the message and the seconds waited."""


class TransportTimeout(TransportError):
    """A peer is there, but a message did not come, or was not taken, in time."""


class PeerDied(TransportError):
    """A process that messages are exchanged with ended without a farewell."""


class PeerAborted(TransportError):
    """A process that messages are exchanged with gave up; the message repeats its reason."""


class PeerClosed(TransportError):
    """A process that messages are exchanged with ended in order, but too early."""


class MessageMismatch(TransportError):
    """A message has another shape or dtype than the schedule says."""


def shortened(text: str, limit: int = _MAX_WORD) -> str:
    """Return text with the middle left out if it has more characters than the limit."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}...({len(text)} characters)...{text[-half:]}"


def line_of(message: object) -> str:
    """Return a message as it may be printed, whatever users or files put into it.

    Long words are shortened, and characters that would steer a terminal are written as escapes.
    """
    words = re.sub(rf"\S{{{_MAX_WORD + 1},}}", lambda match: shortened(match[0]), str(message))
    text = shortened(words, _MAX_LINE)
    return "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text)


def leave_telling_to_another() -> None:
    """Wait while another process tells why all of them end.

    A launcher kills all processes as soon as one has ended.
    """
    time.sleep(TELLING_S)


def reason_of(error: BaseException) -> str:
    """Return why something failed, in one short line, also where the error itself has no text."""
    if isinstance(error, EOFError):
        return "it ends too early"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return shortened(first.strip()) or type(error).__name__


class UpstreamMismatch(MegatronExtError):
    """The installed Megatron is not the one that a patch was written for.

    Args:
        target: The patched place, as `module:attribute.path`.
        expected: What the patch relies on, for example a signature.
        found: What is there instead.
        installed: Version of the Megatron that was found.
        supported: Version range or pin that this package supports.
        remedy: What to do about it; by default, install the supported version.
    """

    def __init__(
        self,
        target: str,
        *,
        expected: str,
        found: str,
        installed: str,
        supported: str,
        remedy: str | None = None,
    ) -> None:
        self.target = target
        self.expected = expected
        self.found = found
        self.installed = installed
        self.supported = supported
        if remedy is None:
            remedy = (
                f"Install the supported version (pip install 'megatron-core{supported}') or, at "
                f"your own risk, set MEGATRON_EXT_DRIFT=warn"
            )
        super().__init__(
            f"{target}: expected {expected}, found {found}; Megatron {installed} is installed, "
            f"{supported} is supported. {remedy}."
        )
