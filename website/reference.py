"""Generates the page of all commands and flags, with defaults, from their help texts."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from megatron_ext import cli
from megatron_ext.config.flags import add_arguments

HEAD = """# Commands and flags

This page is generated from the help texts of this version. `-` means that there is no default.

## Training

Pass these flags after the script, in addition to Megatron's flags:
`megatron-ext launch -- pretrain_gpt.py FLAGS`. Programs without a command line read them from
`MEGATRON_EXT_FLAGS` ([more](docs/configure.md)).
"""


def page() -> str:
    """Return the text of the page."""
    parts = [HEAD, _table(add_arguments(argparse.ArgumentParser(add_help=False)))]
    parser = cli.build_parser()
    for name, (command, line) in _commands(parser).items():
        actions = _commands(command)
        parts += [f"## megatron-ext {name}", _sentence(command.description or line)]
        parts += [] if actions else [_table(command)]
        for action, (own, about) in actions.items():
            parts += [
                f"### {name} {action}",
                _sentence(own.description or about),
                _table(own),
            ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _commands(
    parser: argparse.ArgumentParser,
) -> dict[str, tuple[argparse.ArgumentParser, str]]:
    """Return the subcommands of a parser: for each name, its parser and its line of help."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            lines = {one.dest: str(one.help) for one in action._choices_actions}
            return {name: (one, lines[name]) for name, one in action.choices.items()}
    return {}


def _table(parser: argparse.ArgumentParser) -> str:
    rows = list(_rows(parser))
    return (
        "\n".join(["| argument | default | |", "|---|---|---|", *rows]) if rows else ""
    )


def _rows(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if action.help in (None, argparse.SUPPRESS) or action.dest == "help":
            continue
        is_switch = action.nargs == 0
        values = (
            action.metavar
            or ", ".join(map(str, action.choices or ()))
            or action.dest.upper()
        )
        names = [*action.option_strings[:1], *([] if is_switch else [str(values)])]
        shown = " ".join(f"`{name.replace('|', ' or ')}`" for name in names)
        text = str(action.help) % {**vars(action), "prog": parser.prog}
        given = (
            "-" if is_switch or action.default in (None, []) else str(action.default)
        )
        # Most help texts end with "(default: ...)", which may hold parentheses.
        found = re.search(
            r"[ ,]*(?:\(default: (([^()]|\([^()]*\))*)\)|default: (\S+))\.?$", text
        )
        if found and not is_switch:
            text, given = text[: found.start()], found[1] or found[3]
        yield f"| {shown} | {_escaped(given)} | {_escaped(text)} |"


def _sentence(text: str) -> str:
    return _escaped(f"{text[0].upper()}{text[1:].rstrip('.')}.")


def _escaped(text: str) -> str:
    """Escape plain text for a Markdown table."""
    return re.sub(r"[|*<]", lambda found: f"&#{ord(found[0])};", text)
