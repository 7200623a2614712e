"""A notation for rules about settings, each with a reason and a remedy.

    masked_softmax_fusion & fp16 | bf16 & transformer_impl=local
        its kernel takes as many queries as keys; add --no-masked-softmax-fusion

The unindented lines are the conditions under which settings are rejected, optionally preceded by a
name for use in messages: `words: conditions`. In a condition, `a` means that the argument a is set,
`a=x,y` that it is or contains x or y, `a!=x,y` that it is neither, and `a>1` that it is greater
than a number or another argument. A leading `!` negates a condition. `a | b & c` means (a or b) and
c. The indented lines contain the reason and the remedy; if there is no remedy, the message
recommends leaving the flags out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from textwrap import dedent
from typing import Any, NamedTuple

from megatron_ext.errors import reworded

_CONDITION = re.compile(r"(!?)(\w+)(?:(=|!=|>)(\S+))?")
# Unindented lines, then indented lines.
_ENTRY = re.compile(r"((?:^\S.*\n)+)((?:^ +.*\n)+)", re.MULTILINE)
# Argument -> its flag, if their names differ.
_SPELT = {
    "fp4": "--fp4-format",
    "fp8": "--fp8-format",
    "overlap_p2p_comm_warmup_flush": "--overlap-p2p-communication-warmup-flush",
    "microbatch_group_size_per_vp_stage": "--microbatch-group-size-per-virtual-pipeline-stage",
}
_DESTINATIONS = {flag: dest for dest, flag in _SPELT.items()}
HYBRID_MODELS = (
    "hybrid models (--hybrid-override-pattern, --hybrid-layer-pattern): "
    "is_hybrid_model | hybrid_override_pattern | hybrid_layer_pattern"
)
"""Name and conditions of a rule about models that have layers other than attention."""


class Condition(NamedTuple):
    """A condition on one argument."""

    is_negated: bool
    name: str
    operator: str
    """`=`, `!=` or `>`; empty if the argument only has to be set."""
    operands: tuple[str, ...]
    """Values to compare with. For `>`, numbers or arguments; the first one that is set applies."""

    @classmethod
    def read(cls, text: str) -> Condition:
        """Parse a condition, such as `!a` or `a!=x,y`."""
        match = _CONDITION.fullmatch(text)
        assert match is not None, f"no condition: {text}"
        negation, name, operator, operands = match.groups("")
        values: tuple[str, ...] = ()
        if operands:
            values = tuple(operands.split(","))
        return cls(bool(negation), name, operator, values)

    def holds(self, args: object) -> bool:
        """Return whether the condition holds for these attributes; missing ones count as None."""
        return self._compares(args) != self.is_negated

    def _compares(self, args: object) -> bool:
        value = getattr(args, self.name, None)
        if not self.operator:
            return bool(value)
        if self.operator == ">":
            number = value if isinstance(value, (int, float)) else 0
            return number > self._bound(args)
        wants_operand = self.operator == "="
        values = value if isinstance(value, (list, tuple)) else [value]
        for item in values:
            if item is None:
                continue
            # Compare an enumeration member by its name, without the class name.
            word = str(item).rpartition(".")[2]
            is_operand = word in self.operands
            if is_operand == wants_operand:
                return True
        return False

    def _bound(self, args: object) -> float:
        bound: float | None
        for operand in self.operands:
            if operand.isdigit():
                bound = int(operand)
            else:
                bound = getattr(args, operand, None)
            if bound:
                return bound
        return 1

    @property
    def bounds(self) -> list[str]:
        """The arguments that the condition compares against."""
        if self.operator != ">":
            return []
        return [operand for operand in self.operands if not operand.isdigit()]

    def __str__(self) -> str:
        flag = _SPELT.get(self.name, f"--{self.name.replace('_', '-')}")
        if not self.operator:
            return flag
        if self.operator == ">":
            return f"{flag} above {','.join(self.operands)}"
        if self.operator == "=":
            return f"{flag}={_listed(self.operands, 'or')}"
        return f"{flag} other than {_listed(self.operands, 'and')}"


class Rule(NamedTuple):
    """Megatron settings to reject."""

    reads: tuple[str, ...]
    """The arguments that the rule reads; the first one names the rule."""
    flag: str
    """The rejected settings. Here and in `reason` and `remedy`, settings are written `--flag` or
    `--flag=value`."""
    reason: str
    remedy: str
    """Flags to remove, or to use or add instead."""
    terms: tuple[tuple[Condition, ...], ...]
    """The rule rejects the settings if at least one condition in every term holds."""

    @property
    def message(self) -> str:
        """Reason and remedy in one line, with settings written as flags."""
        return reworded(f"{self.reason}; {self.remedy}", _as_given)

    def refuses(self, args: object) -> bool:
        """Return whether these attributes are rejected; missing ones count as None."""
        for term in self.terms:
            term_holds = any(condition.holds(args) for condition in term)
            if not term_holds:
                return False
        return True

    def without(self, args: object) -> dict[str, Any]:
        """Return attribute values that turn off the settings rejected by the first term."""
        changes: dict[str, Any] = {}
        for condition in self.terms[0]:
            if not condition.holds(args):
                continue
            name = condition.name
            value = getattr(args, name)
            if condition.operator == "!=":
                changes[name] = ",".join(condition.operands)
            elif isinstance(value, (bool, list)):
                changes[name] = type(value)()
            else:
                changes[name] = None
        return changes


def dest_of(flag: str) -> str:
    """Return the argument that a flag sets."""
    dest = flag[2:].replace("-", "_")
    return _DESTINATIONS.get(flag, dest)


def entries(text: str) -> list[tuple[str, str]]:
    """Return a text's entries: unindented lines, each with the indented lines that follow."""
    all_entries = []
    for unindented, indented in _ENTRY.findall(dedent(f"{text}\n")):
        key = " ".join(unindented.split())
        value = " ".join(indented.split())
        all_entries.append((key, value))
    return all_entries


def read_rules(text: str) -> tuple[Rule, ...]:
    """Return the rules in a text."""
    rules = []
    for settings, explanation in entries(text):
        rules.append(_read_rule(settings, explanation))
    return tuple(rules)


def _read_rule(settings: str, explanation: str) -> Rule:
    name, _, conditions = settings.rpartition(": ")
    terms: list[tuple[Condition, ...]] = []
    for text in conditions.split(" & "):
        alternatives = text.split(" | ")
        term = tuple(Condition.read(alternative) for alternative in alternatives)
        terms.append(term)
    # Put names before bounds, because the first entry of `Rule.reads` names the rule.
    names: list[str] = []
    bounds: list[str] = []
    phrases: list[str] = []
    for term in terms:
        for condition in term:
            names.append(condition.name)
            bounds += condition.bounds
        # Skip negated conditions: a flag that is not set cannot be left out.
        has_negated = any(condition.is_negated for condition in term)
        if not has_negated:
            words = [str(condition) for condition in term]
            phrases.append(_listed(words, "or"))
    reads = tuple(dict.fromkeys(names + bounds))
    reason, _, remedy = explanation.partition("; ")
    if not remedy:
        pronoun = "it" if len(reads) == 1 else "them"
        remedy = f"remove {pronoun}"
    return Rule(
        reads,
        name or " and ".join(phrases),
        reason,
        remedy,
        tuple(terms),
    )


def _as_given(flag: str, value: str) -> str:
    return f"{flag} {value}" if value else flag


def _listed(words: Sequence[str], conjunction: str) -> str:
    *before, last = words
    if not before:
        return last
    return f"{', '.join(before)} {conjunction} {last}"
