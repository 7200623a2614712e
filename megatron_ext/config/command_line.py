"""A training's command line, read as the training itself reads it, without torch.

Megatron's flags come from its sources (`megatron_ext/upstream/flag_list.py`), ours from `flags.py`,
and those of a script from its file. Where no Megatron is installed, its flags are taken as they
look: one without a value is a switch, and a number is a number.
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
    parse_words,
    requested_flags,
)
from megatron_ext.upstream.flag_list import megatron_flags, script_flags
from megatron_ext.upstream.scripts import is_megatrons, is_pretraining

_SCRIPT = "pretrain_gpt.py"
"""The script whose flags a command line without a script has."""


@dataclass(frozen=True)
class CommandLine:
    """What the words of a training's command line set."""

    settings: dict[str, Any]
    """Values by the names of Megatron's arguments and ours; a flag that is not given is absent."""
    script: str | None = None
    """The script that they start; None: the words are flags alone."""
    unknown: dict[str, str | None] = field(default_factory=dict)
    """Flags that neither Megatron nor we know, each with a known one that is close, or None."""

    defaults: dict[str, Any] = field(default_factory=dict)
    """Megatron's defaults, as far as its sources say them."""

    @property
    def is_pretraining(self) -> bool:
        """True for Megatron's training scripts, which lack no required flag."""
        return self.script is not None and is_pretraining(self.script)


def read_command_line(words: Sequence[str]) -> CommandLine:
    """Return what a training's command line sets, with the flags of the environment.

    Args:
        words: The flags, after the script or without one. A script that is not Megatron's may have
            flags that are known to nobody here.

    Raises:
        ArgumentsError: A flag is unknown, has no such value, or lacks one.
    """
    words = [word for word in words if word != "--"]  # argparse leaves the separator in
    script = None
    if words and words[0].endswith(".py"):
        script, *words = words
    parser = WordParser(Path(script or _SCRIPT).name)
    parser.add_argument("-h", "--help", action="store_true")
    flags = megatron_flags()
    for flag in flags:
        flag.add_to(parser)
    # A script of the user's may have flags that its file does not show.
    is_user_script = script is not None and not is_megatrons(script)
    if script is not None and is_user_script:
        for flag in script_flags(Path(script)):
            flag.add_to(parser)
    add_arguments(parser)
    # As Megatron's parser gets them; the words prevail.
    parser.set_defaults(**vars(parse_words(requested_flags(), FLAGS)))
    parsed, unknown_words = parser.parse_known_args(words)
    suggestions: dict[str, str | None] = {}
    if flags:
        if unknown_words and not is_user_script:
            parser.error(f"unrecognized arguments: {' '.join(unknown_words)}")
        suggestions = _suggestions(parser, unknown_words)
    return CommandLine(
        settings={**_as_they_look(unknown_words), **vars(parsed)},
        script=script,
        unknown=suggestions,
        defaults={flag.dest: flag.default for flag in flags},
    )


def _suggestions(parser: WordParser, words: Sequence[str]) -> dict[str, str | None]:
    """Return each flag among the words, with a flag of the parser that is close, or None."""
    spellings: list[str] = []
    for action in parser._actions:
        spellings += action.option_strings
    suggestions: dict[str, str | None] = {}
    for word in words:
        if word.startswith("--"):
            flag, *_value = word.split("=")
            close = get_close_matches(flag, spellings, 1)
            suggestions[flag] = close[0] if close else None
    return suggestions


# Destinations of flags of Megatron's that are not named after them.
_DESTINATIONS = {
    "fp4_format": "fp4",
    "fp8_format": "fp8",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
    "no_rope_fusion": "no_apply_rope_fusion",
    "overlap_p2p_communication": "overlap_p2p_comm",
}

# Arguments that are no number even where a mistaken value looks like one.
_TEXTS = (
    "hybrid_layer_pattern", "hybrid_override_pattern", "pipeline_model_parallel_layout",
    "step_batch_size_schedule",
)  # fmt: skip

# Flags of Megatron's that take several values.
_SEVERAL = ("rampup_batch_size", "recompute_modules")


def _as_they_look(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings of flags whose types nobody knows here.

    A flag without a value is a switch; `--no-` turns one off.
    """
    texts_by_dest: dict[str, list[str]] = {}
    texts: list[str] = []
    for word in words:
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            texts = [value] if equals else []
            dest = flag[2:].replace("-", "_")
            texts_by_dest[_DESTINATIONS.get(dest, dest)] = texts
        else:
            texts.append(word)
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
    # A whole number stays one, for messages and for what counts with it.
    for kind in (int, float):
        with suppress(ValueError):
            return kind(word)
    return word
