"""Faults in the runtime, each of which the quick tests must find.

A mutant replaces one piece of a module's text, which must occur exactly once.
"""

from __future__ import annotations

from typing import NamedTuple

_RUNTIME = "megatron_ext.runtime"
_TABLES = "megatron_ext.schedules.table"
_EXECUTOR_TESTS = "tests/runtime/test_executor.py"
_WAYS = "tests/runtime/test_gradient_ways.py"
_WAYS_TEST = f"{_WAYS}::test_every_way_gives_the_bits_of_a_whole_backward[overlap]"
_COMMUNICATION_TESTS = "tests/schedules/table/test_communication.py"


class Mutant(NamedTuple):
    """A fault, with the tests that find it."""

    name: str
    module: str
    """The module whose text is changed."""
    text: str
    instead: str
    tests: tuple[str, ...] = (_EXECUTOR_TESTS,)


MUTANTS = (
    Mutant(
        "I and W are swapped",
        f"{_RUNTIME}.compute",
        'split=kind == "I"',
        'split=kind == "B"',
        ("tests/runtime/test_compute.py",),
    ),
    Mutant(
        "hooks on weights are not seen",
        f"{_RUNTIME}.split",
        "if type(hook) is not _Watch:",
        "if False:",
        (_WAYS_TEST,),
    ),
    Mutant(
        "a gradient of another use is lost",
        f"{_RUNTIME}.split",
        "        waiting.append(ArrivedGradient(waiting[0].weights, weight, gradient))\n",
        "",
        (_WAYS_TEST,),
    ),
    Mutant(
        "any backward inside of I leaves gradients to W",
        f"{_RUNTIME}.split_linear",
        "        and will_accumulate(accumulator)\n",
        "",
        (_WAYS_TEST,),
    ),
    Mutant(
        "a hand-over is dropped",
        f"{_RUNTIME}.executor",
        "            self._handed[message] = tensor\n",
        "",
    ),
    Mutant(
        "a handed activation shares its data with the one that is freed",
        f"{_RUNTIME}.executor",
        "                self._handed[message] = tensor.detach()\n",
        "                pass\n",
    ),
    Mutant(
        "a message names the stage that made it",
        f"{_TABLES}.communication",
        "        tensor = tensor_of(target)\n",
        "        tensor = tensor_of(source)\n",
        (_COMMUNICATION_TESTS,),
    ),
    Mutant(
        "gradients are reduced one action too early",
        f"{_RUNTIME}.executor",
        "action.stage, not self._remaining[action.stage]",
        "action.stage, self._remaining[action.stage] == 1",
    ),
    Mutant(
        "parameters are gathered after their first use",
        f"{_RUNTIME}.executor",
        "if self._remaining[stage] == self.table.actions_by_stage[stage]:",
        "if self._remaining[stage] == self.table.actions_by_stage[stage] - 1:",
    ),
    Mutant(
        "reductions start as chunks are complete, whatever the order of the peers",
        f"{_RUNTIME}.sync",
        "if next_stage not in self._complete:",
        "if not self._complete:",
        ("tests/runtime/test_sync.py",),
    ),
    Mutant(
        "a dynamic order sums gradients as they come",
        "megatron_ext.schedules.search.progress",
        "        for positions in sums.values():\n",
        "        for positions in list[list[int]]():\n",
        ("tests/schedules/search/test_policies.py",),
    ),
    Mutant(
        "a dynamic order begins a stage with any forward",
        "megatron_ext.schedules.search.progress",
        "        for positions in forwards.values():\n",
        "        for positions in [[0]]:\n",
        ("tests/schedules/search/test_policies.py",),
    ),
    Mutant(
        "a dynamic order computes W after a later B",
        "megatron_ext.schedules.search.progress",
        '            if action.kind in ("B", "W"):\n',
        '            if action.kind == "W":\n',
        ("tests/schedules/search/test_policies.py",),
    ),
    Mutant(
        "a dynamic order waits for no partner",
        "megatron_ext.schedules.search.policies",
        "return self.patience.gains[self._head]",
        "return 0.0",
        ("tests/schedules/search/test_policies.py",),
    ),
    Mutant(
        "followers run a pair of their leader as two actions",
        f"{_RUNTIME}.ordering",
        "return forward + len(self.policy.progress.row), backward",
        "return forward, backward",
        ("tests/runtime/test_ordering.py",),
    ),
    Mutant(
        "a slot is freed before the copy out of it has ended",
        "megatron_ext.transport.staging",
        "self._releases.after(copied, lambda: None, tensor)",
        "self._releases.after(copied, lambda: None, None)",
        ("tests/transport/test_staged_release.py",),
    ),
    Mutant(
        "a table has one slot too few",
        f"{_TABLES}.memory",
        "in peak_by_receiver.items():\n",
        "in peak_by_receiver.items():\n            peak = max(1, peak - 1)\n",
        ("tests/schedules/table/test_bypasses.py",),
    ),
    Mutant(
        "outputs are freed before they are sent",
        f"{_RUNTIME}.executor",
        "        for transfer, tensor in zip(exchange.outputs, tensors, strict=True):\n",
        "        self.compute.release(tensors)\n"
        "        for transfer, tensor in zip(exchange.outputs, tensors, strict=True):\n",
    ),
    Mutant(
        "the graph of a backward is freed before its gradient leaves",
        f"{_RUNTIME}.executor",
        "        self._deliver(exchange, outputs)\n",
        "        del saved\n        saved = None\n        self._deliver(exchange, outputs)\n",
    ),
    Mutant(
        "an order that ends early passes for complete",
        f"{_RUNTIME}.executor",
        "        if leftovers:\n",
        "        if not leftovers:\n",
    ),
    Mutant(
        "all tensors of a hand-over have one name",
        f"{_RUNTIME}.program",
        "part=message.part + self.part, header=self.header",
        "header=self.header",
    ),
    Mutant(
        "what goes to the twin goes along the own pipeline",
        f"{_RUNTIME}.program",
        "self.mirrored if transfer.to_twin else self.pipeline",
        "self.pipeline",
    ),
    Mutant(
        "credits are granted for one micro-batch too many",
        f"{_TABLES}.communication",
        "if granted >= self._schedule.num_microbatches:",
        "if granted > self._schedule.num_microbatches:",
        (_COMMUNICATION_TESTS,),
    ),
    Mutant(
        "two kinds of message share a tag",
        "megatron_ext.transport.native_transport",
        '"W": 4',
        '"W": 3',
        ("tests/transport/test_tags.py",),
    ),
)
