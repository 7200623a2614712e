"""The `megatron-ext` command: a subcommand for each task other than training.

Each `_add_*` registers a subcommand and its `_run_*`, which returns an exit code. Only the `_run_*`
functions import torch and Megatron, so `--help` and usage errors appear immediately.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from megatron_ext.errors import MegatronExtError, UserError, line_of, parser_line
from megatron_ext.upstream import releases
from megatron_ext.upstream import tree as upstream
from megatron_ext.version import __version__

_REQUIRED = ("megatron", "numpy", "packaging", "psutil", "rich", "torch", "wrapt")
"""Packages that may be missing from an environment; `main` reports a missing one in one line."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors raised when the disk is full, a quota is exceeded or a file is too large."""
_REMOVED = {
    "--fp8": "use --precision fp8",
    "--markdown": "python website/patch_table.py prints that table",
}
"""Flags from 0.1.0 that were removed -> what to do instead."""
_Subparsers = Any  # argparse._SubParsersAction is private


_GROUPS = {
    ("schedules", "docs/planning.md"): {
        "plan": "megatron-ext plan --pp 4 --microbatches 16",
        "plot": "megatron-ext plot zb-v --pp 4 --microbatches 8 -o zb-v.svg",
    },
    ("jobs", "docs/launching.md"): {
        "launch": "megatron-ext launch -- pretrain_gpt.py --pipeline-schedule zb-v ...",
        "status": "megatron-ext status RUN_ID",
        "logs": "megatron-ext logs RUN_ID --rank 3",
        "stop": "megatron-ext stop RUN_ID",
        "compare": "megatron-ext compare -- pretrain_gpt.py --pipeline-schedule zb-v ...",
        "doctor": "megatron-ext doctor --hostfile hosts",
    },
    ("traces", "docs/tracing.md"): {
        "aggregate": "megatron-ext aggregate --trace-dir benchmark/RUN",
        "report": "megatron-ext report --trace-dir benchmark/RUN",
    },
    ("upstream", "docs/patching.md"): {
        "upstream": "megatron-ext upstream fetch",
        "patches": "megatron-ext patches check",
    },
}
"""(Group, its documentation page) -> command -> example."""


class _Parser(argparse.ArgumentParser):
    """A parser that reports errors in one line, in this package's style."""

    def error(self, message: str) -> NoReturn:
        line = line_of(parser_line(self, message))
        print(f"megatron-ext: error: {line}", file=sys.stderr)
        raise SystemExit(2)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments; the subcommand's parser reports unknown arguments."""
        # argparse would report them with the main parser's usage.
        parsed, unknown_words = self.parse_known_args(args, namespace)
        if unknown_words:
            command = getattr(parsed, "parser", self)
            for word in _REMOVED.keys() & unknown_words:
                command.error(f"{word} was removed; {_REMOVED[word]}")
            command.error(f"unrecognized arguments: {' '.join(unknown_words)}")
        return parsed


def _overview(commands: dict[str, str]) -> str:
    """Return the help text of `megatron-ext` itself, built from each command's help line."""
    lines = [
        "usage: megatron-ext COMMAND ...",
        "",
        "Better pipelines for an unmodified Megatron-LM. To train on this machine, or on several",
        "with --hostfile, use `megatron-ext launch -- pretrain_gpt.py FLAGS` or torchrun:",
        "`torchrun ... -m megatron_ext pretrain_gpt.py FLAGS`.",
    ]
    for (group, page), examples in _GROUPS.items():
        lines += ["", f"{group} ({page}):"]
        for name, example in examples.items():
            if name in commands:
                lines.append(f"  {name:<11}{commands[name]}")
                lines.append(f"{'':13}$ {example}")
    lines += ["", "`megatron-ext COMMAND --help` shows its flags."]
    return "\n".join(lines)


def lacking(error: ModuleNotFoundError) -> str:
    """Return the error line for a module missing from this Python installation."""
    checkout = Path(__file__).resolve().parents[1]
    # The package is not on any index yet. When running from a checkout, recommend
    # installing that checkout.
    is_checkout = (checkout / "pyproject.toml").is_file()
    package = "megatron-ext"
    if is_checkout:
        package = f"-e {shlex.quote(str(checkout))}"
    return (
        f"{sys.executable} has no {error.name}; run in the environment where megatron_ext is "
        f"installed, or `{sys.executable} -m pip install {package}`"
    )


def build_parser() -> argparse.ArgumentParser:
    """Return the parser for the `megatron-ext` command, with all subcommands."""
    from megatron_ext.tools import plan_command, schedule_commands
    from megatron_ext.tools.compare import compare_commands as compare
    from megatron_ext.tools.doctor import doctor_command as doctor
    from megatron_ext.tools.launch import launch_commands as launch
    from megatron_ext.tools.trace import trace_commands as trace

    parser = _Parser(prog="megatron-ext")
    parser.add_argument(
        "--version", action="version", version=f"megatron_ext {__version__}"
    )
    subparsers: _Subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_patches(subparsers)
    schedule_commands.add_subcommands(subparsers)
    launch.add_subcommands(subparsers)
    compare.add_subcommand(subparsers)
    doctor.add_subcommand(subparsers)
    trace.add_subcommands(subparsers)
    trace.add_to_plan(subparsers)
    plan_command.add_to_plan(subparsers)
    _add_upstream(subparsers)
    helps = {action.dest: action.help for action in subparsers._choices_actions}
    overview = _overview(helps)
    # argparse would list the commands without groups or examples.
    parser.format_help = lambda: overview + "\n"  # type: ignore[method-assign]
    for (_, page), examples in _GROUPS.items():
        for name in examples.keys() & subparsers.choices.keys():
            command = subparsers.choices[name]
            command.epilog = f"example: {examples[name]} (see {page})"
            command.set_defaults(parser=command)
    return parser


def _add_patches(subparsers: _Subparsers) -> None:
    parser = subparsers.add_parser(
        "patches",
        help="list or check the patches to Megatron",
        description="List the changes that this package makes to Megatron's functions, or check "
        "that they fit the installed release.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser("list", help="show every patch with its state and reason")
    show.add_argument(
        "--all", action="store_true", help="also show each redirected torch name"
    )
    show.add_argument("--json", action="store_true", help="print JSON")
    actions.add_parser("check", help="compare every target with the installed release")
    parser.set_defaults(run=_run_patches)


def _add_upstream(subparsers: _Subparsers) -> None:
    parser = subparsers.add_parser(
        "upstream",
        help="get, find or check the Megatron-LM tree",
        description="Get, find or check the Megatron-LM tree that contains the training scripts.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    fetch = actions.add_parser(
        "fetch", help="clone Megatron-LM at the wheel's release and verify it"
    )
    fetch.add_argument(
        "--path", type=Path, help="destination (default: under ~/.cache)"
    )
    fetch.add_argument(
        "--url", default=upstream.URL, help="the repository to clone, or a mirror of it"
    )
    actions.add_parser("path", help="print the tree that would be used")
    actions.add_parser("check", help="compare the tree with the installed core")
    parser.set_defaults(run=_run_upstream)


def _run_patches(args: argparse.Namespace) -> int:
    from megatron_ext.patches import listing
    from megatron_ext.patches.registry import REGISTRY

    absent = listing.import_targets()
    rows = REGISTRY.rows()
    if args.action == "list" and args.json:
        names = "id target kind feature order state intact active drift reason releases required"
        listed = []
        for row in rows:
            fields = {name: getattr(row, name) for name in names.split()}
            listed.append(fields)
        print(json.dumps(listed, indent=1))
        return 0
    if args.action == "list":
        print(listing.text_table(rows, redirects=args.all))
        if absent:
            print(f"not installed, so their patches are pending: {', '.join(absent)}")
        return 0
    problems = listing.problems(rows)
    for line in problems:
        print(line)
    # A pending row could not be checked, because its module cannot be imported here.
    rows = [row for row in rows if row.state != "other release"]
    num_checked = sum(row.state != "pending" for row in rows)
    note = ""
    if absent:
        num_unchecked = len(rows) - num_checked
        note = f", {num_unchecked} not checked (no {', '.join(absent)})"
    print(f"{num_checked} patches checked{note}: {len(problems)} problems")
    return 1 if problems else 0


def _run_upstream(args: argparse.Namespace) -> int:
    if args.action == "fetch":
        path = upstream.fetch(args.path, args.url)
        print(path)
        if args.path is not None:
            print(f"export MEGATRON_LM_PATH={path.resolve()}", file=sys.stderr)
        return 0
    if args.action == "path":
        print(upstream.require_tree())
        return 0
    core = releases.core_version() or "(none)"
    print(f"megatron-core {core} is installed, {releases.SUPPORTED} is supported")
    # Without a tree, `require_tree` raises an error that says how to get one.
    tree = upstream.find_tree() or upstream.require_tree()
    version, commit, problems = upstream.tree_status(tree)
    commit_text = commit[:12] if commit else "not a git checkout"
    print(f"{tree}: version {version}, commit {commit_text}")
    for problem in problems:
        print(f"{tree}: {problem}")
    return int(bool(problems))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `megatron-ext` command.

    Args:
        argv: Arguments without the program name. If None, `sys.argv[1:]` is used.

    Returns:
        The exit code: 0 for success, 1 if a check finds problems, 2 for a user error, 3 if the
        numbers of compared runs differ.
    """
    try:
        parser = build_parser()
        with suppress(ImportError):  # optional: pip install argcomplete
            import argcomplete

            argcomplete.autocomplete(parser)
        args = parser.parse_args(argv)
        if args.command is None:
            parser.print_help()
            return 0
        code = int(args.run(args))
        # Flush while errors can still be reported: if the disk is full, flushing at
        # exit would print a traceback.
        sys.stdout.flush()
        return code
    except MegatronExtError as error:
        print(f"megatron-ext: error: {line_of(error)}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _REQUIRED:
            raise
        print(f"megatron-ext: error: {lacking(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("megatron-ext: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The process reading our output has exited (`| head`), which is not an error.
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.filename is not None or error.errno not in _NO_ROOM:
            raise
        # Python flushes the buffered output again at exit, and that must not fail a
        # second time.
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 1)
        print(
            f"megatron-ext: error: standard output: {error.strerror}", file=sys.stderr
        )
        return 1


if __name__ == "__main__":
    sys.exit(main())
