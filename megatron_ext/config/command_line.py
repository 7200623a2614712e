"""Parses a training command line the way the training job does, but without importing torch.

Megatron's flags come from its sources (`megatron_ext/upstream/flag_list.py`), ours from `flags.py`,
and a script's flags from the script's file. If Megatron is not installed, the types of its flags
are guessed: a flag without a value is a switch, and a word that looks like a number is treated as
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megatron_ext.config.flags import (
    FLAGS,
    WordParser,
    add_arguments,
    attribute_of,
    parse_words,
    requested_flags,
)
from megatron_ext.upstream.flag_list import megatron_flags, script_flags
from megatron_ext.upstream.scripts import is_megatrons, is_pretraining

_SCRIPT = "pretrain_gpt.py"
"""The script that is assumed if a command line names none."""


@dataclass(frozen=True)
class CommandLine:
    """The settings in a training command line."""

    settings: dict[str, Any]
    """Values by argument name, for Megatron's arguments and ours. Flags that are not given are
    absent."""
    script: str | None = None
    """The script to start, or None if the command line contains only flags."""
    unknown: dict[str, str | None] = field(default_factory=dict)
    """Flags that neither Megatron nor this package defines -> a similar flag that exists, or None.
    """

    defaults: dict[str, Any] = field(default_factory=dict)
    """Megatron's defaults; None where its sources compute the default."""

    @property
    def is_pretraining(self) -> bool:
        """Whether a Megatron training script runs, so that its required flags can be checked."""
        return self.script is not None and is_pretraining(self.script)


def read_command_line(words: Sequence[str]) -> CommandLine:
    """Return the settings from a training command line and from the flags in the environment.

    Args:
        words: The flags, optionally preceded by a script.

    Raises:
        ArgumentsError: A flag is unknown, or its value is invalid or missing.
    """
    # `parse_known_args` would return the separator as an unknown word.
    words = [word for word in words if word != "--"]
    script = None
    if words and words[0].endswith(".py"):
        script = words[0]
        words = words[1:]
    parser = WordParser(Path(script or _SCRIPT).name)
    # A plain switch, because argparse's own -h would print this parser's help and exit.
    parser.add_argument("-h", "--help", action="store_true")
    flags = megatron_flags()
    for flag in flags:
        flag.add_to(parser)
    # A user's script may define flags outside its own file, so accept unknown flags for it.
    is_user_script = script is not None and not is_megatrons(script)
    # Add these after Megatron's flags, because a script may redefine them.
    if script is not None and is_user_script:
        for flag in script_flags(Path(script)):
            flag.add_to(parser)
    add_arguments(parser)
    # Set the environment's flags as defaults, as a job does, so that the command line
    # overrides them.
    environment = parse_words(requested_flags(), FLAGS)
    parser.set_defaults(**vars(environment))
    parsed, unknown_words = parser.parse_known_args(words)
    suggestions: dict[str, str | None] = {}
    # Without Megatron's sources, all of its flags are unknown here, so nothing can be rejected.
    if flags:
        # Megatron's own scripts reject unknown flags too.
        if unknown_words and not is_user_script:
            parser.error(f"unrecognized arguments: {' '.join(unknown_words)}")
        suggestions = _suggestions(parser, unknown_words)
    guessed = _as_they_look(unknown_words)
    return CommandLine(
        settings={**guessed, **vars(parsed)},
        script=script,
        unknown=suggestions,
        defaults={flag.dest: flag.default for flag in flags},
    )


def _suggestions(parser: WordParser, words: Sequence[str]) -> dict[str, str | None]:
    """Return, for each flag among the words, a similar flag that the parser knows, or None."""
    spellings: list[str] = []
    for action in parser._actions:
        spellings += action.option_strings
    suggestions: dict[str, str | None] = {}
    for word in words:
        if word.startswith("--"):
            flag, _, _value = word.partition("=")
            close = get_close_matches(flag, spellings, 1)
            suggestions[flag] = close[0] if close else None
    return suggestions


# Megatron flags whose destination differs from the flag's name.
_DESTINATIONS = {
    "fp4_format": "fp4",
    "fp8_format": "fp8",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
    "no_rope_fusion": "no_apply_rope_fusion",
    "overlap_p2p_communication": "overlap_p2p_comm",
}

# Arguments whose values are text, even if they look like numbers.
_TEXTS = (
    "hybrid_layer_pattern", "hybrid_override_pattern", "pipeline_model_parallel_layout",
    "step_batch_size_schedule",
)  # fmt: skip

# Megatron's flags that take several values.
_SEVERAL = ("rampup_batch_size", "recompute_modules")


def _as_they_look(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings from flags whose types are unknown.

    A flag without a value is a switch, and `--no-NAME` turns a switch off.
    """
    texts_by_dest: dict[str, list[str]] = {}
    texts: list[str] = []
    # Collect the words that follow each flag.
    for word in words:
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            texts = [value] if equals else []
            dest = attribute_of(flag)
            texts_by_dest[_DESTINATIONS.get(dest, dest)] = texts
        else:
            texts.append(word)
    # Guess each flag's type from the number and form of its words.
    settings: dict[str, Any] = {}
    for dest, texts in texts_by_dest.items():
        if dest in _TEXTS:
            settings[dest] = " ".join(texts)
        elif len(texts) == 1 and dest not in _SEVERAL:
            settings[dest] = _number(texts[0])
        elif texts:
            settings[dest] = [_number(text) for text in texts]
        elif dest.startswith("no_"):
            settings[dest.removeprefix("no_")] = False
        elif dest == "disable_bias_linear":
            settings["add_bias_linear"] = False
        else:
            settings[dest] = True
    return settings


def _number(word: str) -> int | float | str:
    # Try `int` first, so that whole numbers stay integers in messages and counts.
    for kind in (int, float):
        with suppress(ValueError):
            return kind(word)
    return word
