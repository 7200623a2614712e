"""Every flag of the installed release's parser was considered: supported, refused or of no concern.

Schedules, transports and disaggregation change what runs when and where. A new flag of Megatron's
that does so too has to be refused beside them, or dropped with a line of the log.
`considered_flags.txt` lists the flags of all releases that somebody has looked at with that in mind
(`docs/upgrading-the-pin.md`).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_ext.upstream import releases
from megatron_ext.upstream import tree as upstream
from tests.ranks import run_ranks, run_script, start_script
from tests.training.helpers import errors
from tests.upstream_script.runs import GPT

pytestmark = pytest.mark.skipif(
    not releases.has_training() and upstream.find_tree() is None,
    reason="megatron-core 0.16 needs MEGATRON_LM_PATH for megatron.training",
)

PP2 = GPT + "--pipeline-model-parallel-size 2 "


def _options() -> list[str]:
    """Return the flags of Megatron's parser, without those that we add to it."""
    from argparse import ArgumentParser

    from megatron.training.arguments import add_megatron_arguments

    from megatron_ext.config.flags import add_arguments

    own = ArgumentParser()
    add_arguments(own)
    ours = {option for action in own._actions for option in action.option_strings} - {
        "-h",
        "--help",
    }
    parser = add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    return [
        option
        for action in parser._actions
        for option in action.option_strings
        if option not in ours
    ]


def test_every_flag_was_considered() -> None:
    [options] = run_ranks(1, _options)
    assert len(options) > 600
    known = set(Path(__file__).with_name("considered_flags.txt").read_text().split())
    assert not set(options) - known, (
        "support these flags, refuse them beside what they do not go with (incompatible.py), or "
        f"list them in considered_flags.txt: {sorted(set(options) - known)}"
    )


def _defaults_without_a_flag() -> list[str]:
    """Return the device's defaults that the parser of the installed release does not take."""
    from argparse import ArgumentParser

    from megatron.training.arguments import add_megatron_arguments

    from megatron_ext import devices
    from megatron_ext.config.flags import MEGATRON_FIELDS

    known = {
        action.dest for action in add_megatron_arguments(ArgumentParser())._actions
    }
    defaults = devices.current().argument_defaults
    return [name for name in defaults if not {name, MEGATRON_FIELDS.get(name)} & known]


def test_every_default_of_the_device_has_a_flag() -> None:
    [missing] = run_ranks(1, _defaults_without_a_flag)
    assert missing == []


def _upstream_has(flag: str) -> bool:
    [options] = run_ranks(1, _options)
    return flag in options


@pytest.mark.short_s(4)
def test_new_features_are_refused_in_one_line() -> None:
    flag = "--tensor-parallel-num-weight-shards"
    if not _upstream_has(flag):
        pytest.skip(f"{releases.core_version()} has no {flag}")
    ended = start_script(
        2, "pretrain_gpt.py", f"{PP2}--pipeline-schedule 1f1b {flag} 2".split()
    )
    [line] = set(errors(ended))
    assert "--pipeline-schedule 1f1b cannot run with" in line
    assert flag in line


@pytest.mark.parametrize("flag", ["--cuda-graph-impl local", "--moe-paged-stash"])
def test_what_a_schedule_does_without_is_dropped_in_one_line(flag: str) -> None:
    name = flag.partition(" ")[0]
    if not _upstream_has(name):
        pytest.skip(f"{releases.core_version()} has no {name}")
    logs = run_script(
        2, "pretrain_gpt.py", f"{PP2}--pipeline-schedule 1f1b {flag}".split()
    )
    assert re.search(rf"{name}.* is dropped: ", logs[0])
