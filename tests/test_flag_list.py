"""The list of Megatron's flags is that of its own parser, on every release."""

from __future__ import annotations

from argparse import Action, ArgumentParser
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.upstream import flag_list, releases
from megatron_ext.upstream import tree as upstream
from tests.ranks import run_ranks


def _described(parser: ArgumentParser) -> dict[str, list[Any]]:
    return {
        name: _facts(action)
        for action in parser._actions
        for name in action.option_strings
    }


def _facts(action: Action) -> list[Any]:
    kind = action.type if action.type in (int, float) else None
    choices = sorted(
        str(getattr(choice, "name", choice)) for choice in action.choices or ()
    )
    return [action.dest, action.nargs, type(action).__name__, kind, choices]


def _both() -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    from megatron.training.arguments import add_megatron_arguments

    from megatron_ext.config.flags import DESTINATIONS

    listed, parser = (
        ArgumentParser(allow_abbrev=False),
        ArgumentParser(allow_abbrev=False),
    )
    for flag in flag_list.megatron_flags():
        flag.add_to(listed)
    add_megatron_arguments(parser)
    of_parser = _described(parser)
    return _described(listed), {
        name: facts for name, facts in of_parser.items() if facts[0] not in DESTINATIONS
    }


@pytest.mark.skipif(
    not releases.has_training() and upstream.find_tree() is None,
    reason="megatron-core 0.16 needs MEGATRON_LM_PATH for megatron.training",
)
def test_the_list_is_that_of_the_parser() -> None:
    [(listed, of_parser)] = run_ranks(1, _both)
    assert len(listed) > 600
    assert listed.keys() == of_parser.keys()
    different = {name for name, facts in listed.items() if facts != of_parser[name]}
    # Their converters compare the word with the names of an enumeration: more than the parser says;
    # and the device adds a backend of its own.
    assert different <= {
        "--cuda-graph-scope",
        "--cuda-graph-modules",
        "--distributed-backend",
    }


def test_a_script_adds_its_own(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "def add(parser):\n"
        "    group = parser.add_argument_group('mine')\n"
        "    group.add_argument('--rows', '--num-rows', type=int, default=3, nargs='+')\n"
        "    group.add_argument('--kind', choices=['a', 'b'], type=convert)\n"
        "    group.add_argument('positional')\n"
        "    group.add_argument(name)\n"
    )
    rows, kind = flag_list.script_flags(script)
    assert (rows.names, rows.keywords) == (
        ("--rows", "--num-rows"),
        {"nargs": "+", "type": int},
    )
    assert (rows.default, rows.dest) == (3, "rows")
    assert kind.keywords == {"choices": ["a", "b"], "type": str}
    script.write_text("not Python at all")
    assert flag_list.script_flags(script) == ()


@pytest.mark.parametrize("word", ["2", "([0]*3+[1]*1)*2", "[1, 0]"])
def test_a_list_of_layers(word: str) -> None:
    assert flag_list._frequency(word) in (word, int(word) if word.isdigit() else None)


@pytest.mark.parametrize("word", ["x", "[x]", "__import__('os')[0]", ""])
def test_no_list_of_layers(word: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        flag_list._frequency(word)
