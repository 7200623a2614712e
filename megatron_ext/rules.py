"""A notation for rules about settings, each with the reason and a remedy.

    masked_softmax_fusion & fp16 | bf16 & transformer_impl=local
        its kernel takes as many queries as keys; add --no-masked-softmax-fusion

The lines at the margin say which settings are refused, perhaps after what a message calls them:
`words: conditions`. `a` is set, `a=x,y` is or holds one of these, `a!=x,y` another, `a>1` is above
a number or an argument, `!a` the contrary; `a | b & c` is (a or b) and c. The indented lines have
the reason and, where it is not just to leave the flags out, the remedy.
"""

from __future__ import annotations

import re
from textwrap import dedent
from typing import Any, NamedTuple

_CONDITION = re.compile(r"(!?)(\w+)(?:(=|!=|>)(\S+))?")
# Flags that are not named after their argument.
_SPELT = {
    "fp4": "--fp4-format",
    "fp8": "--fp8-format",
    "overlap_p2p_comm_warmup_flush": "--overlap-p2p-communication-warmup-flush",
    "microbatch_group_size_per_vp_stage": "--microbatch-group-size-per-virtual-pipeline-stage",
}


class Rule(NamedTuple):
    """Settings of Megatron's to refuse."""

    reads: tuple[str, ...]
    """The arguments that decide; the first one names the rule."""
    flag: str
    reason: str
    remedy: str
    """Flags to leave out, use or add in place of those."""
    terms: list[list[tuple[str, ...]]]
    """Conditions; it refuses where one of each term holds."""

    @property
    def message(self) -> str:
        """Reason and remedy in one line."""
        return f"{self.reason}; {self.remedy}"

    def refuses(self, args: object) -> bool:
        """Return whether attributes, None for missing ones, are refused."""
        return all(any(_holds(args, *condition) for condition in term) for term in self.terms)

    def without(self, args: object) -> dict[str, Any]:
        """Return the attributes that leave out those settings that the first term refuses."""
        off: dict[str, Any] = {}
        for no, name, how, wanted in self.terms[0]:
            if _holds(args, no, name, how, wanted):
                value = getattr(args, name)
                if how == "!=":
                    off[name] = wanted
                else:
                    off[name] = type(value)() if isinstance(value, (bool, list)) else None
        return off


def entries(text: str) -> list[tuple[str, str]]:
    """Return the entries of a list: lines at its margin, and the indented ones after them."""
    found = re.findall(r"((?:^\S.*\n)+)((?:^ +.*\n)+)", dedent(f"{text}\n"), re.MULTILINE)
    return [(" ".join(key.split()), " ".join(value.split())) for key, value in found]


def read_rules(text: str) -> tuple[Rule, ...]:
    """Return the rules of a text."""
    found = []
    for settings, why in entries(text):
        words, _, conditions = settings.rpartition(": ")
        terms = [
            [_CONDITION.fullmatch(one).groups("") for one in term.split(" | ")]  # type: ignore[union-attr]
            for term in conditions.split(" & ")
        ]
        names = [name for term in terms for _, name, *_ in term]
        bounds = [name for term in terms for *_, how, many in term if how == ">"
                  for name in many.split(",") if not name.isdigit()]  # fmt: skip
        reads = tuple(dict.fromkeys(names + bounds))
        flags = " and ".join(
            _listed([_in_words(*one) for _, *one in term], "or")
            for term in terms
            if not any(no for no, *_ in term)
        )
        reason, _, remedy = why.partition("; ")
        usual = f"leave {'it' if len(reads) == 1 else 'them'} out"
        found.append(Rule(reads, words or flags, reason, remedy or usual, terms))
    return tuple(found)


def _holds(args: object, no: str, name: str, how: str, wanted: str) -> bool:
    value = getattr(args, name, None)
    if how == ">":
        bounds = [int(one) if one.isdigit() else getattr(args, one, None)
                  for one in wanted.split(",")]  # fmt: skip
        number = value if isinstance(value, (int, float)) else 0
        return (number > next(filter(None, bounds), 1)) != bool(no)
    if not how:
        return bool(value) != bool(no)
    values = value if isinstance(value, (list, tuple)) else [value]
    # A value may be an enumeration's member.
    named = [str(one).rpartition(".")[2] for one in values if one is not None]
    return any((one in wanted.split(",")) == (how == "=") for one in named) != bool(no)


def _in_words(name: str, how: str, wanted: str) -> str:
    flag = _SPELT.get(name, f"--{name.replace('_', '-')}")
    if not how:
        return flag
    if how == ">":
        return f"{flag} above {wanted}"
    values = wanted.split(",")
    if how == "=":
        return f"{flag} {_listed(values, 'or')}"
    return f"{flag} other than {_listed(values, 'and')}"


def _listed(words: list[str], last: str) -> str:
    *before, end = words
    return f"{', '.join(before)} {last} {end}" if before else end
