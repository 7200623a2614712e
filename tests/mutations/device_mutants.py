"""Faults that show only on a device behind its host; on a GPU each hangs or corrupts results."""

from __future__ import annotations

from tests.mutations.mutants import Mutant

_SHARING = "megatron_ext.devices.sharing"
_COPIES = "megatron_ext.devices.copies"
_STAGING = "megatron_ext.transport.staging"
_TORCH = "megatron_ext.transport.torch_dist"
_QUEUED = "tests/transport/test_queued.py::test_nothing_is_read_or_freed_too_early"
_ONE_WAY = "tests/transport/test_queued.py::test_a_buffer_is_used_again_when_its_reader_has_read"
_MEMORY = "tests/transport/test_device_memory.py"
_SCHEDULE = "tests/test_matrix.py::test_bits_of_megatrons_own[zb-v, one queue torch, four stages]"

_LOOKING_AHEAD = "tests/runtime/test_looking_ahead.py"
_RUN_AHEAD = "tests/runtime/test_run_ahead.py"


def _on(way: str, *late: str) -> tuple[str, ...]:
    return tuple(f"{_QUEUED}[{way}-{what}]" for what in late)


DEVICE_MUTANTS = (
    Mutant(
        "a push does not wait for what computes its tensor",
        _SHARING,
        "            self._out.wait_stream(self._runtime.current_stream(self._device))\n",
        "",
        _on("ipc", "kernels"),
    ),
    Mutant(
        "a buffer is used again before its reader has read it",
        _SHARING,
        "        return buffer.used_there is None or bool(buffer.used_there.query())\n",
        "        return True\n",
        (f"{_ONE_WAY}[ipc]",),
    ),
    Mutant(
        "a pushed tensor is freed before the push has read it",
        _SHARING,
        "            tensor.record_stream(self._out)\n",
        "",
        _on("ipc", "copies"),
    ),
    Mutant(
        "a push is not told to the reader's device",
        _SHARING,
        "            self._out.record_event(buffer.used)\n",
        "",
        _on("ipc", "copies of rank 0", "copies"),
    ),
    Mutant(
        "a pull does not wait for the push",
        _SHARING,
        "            self._in.wait_event(buffer.used_there)\n",
        "",
        _on("ipc", "copies of rank 0", "copies"),
    ),
    Mutant(
        "a pull is not told to the writer's device",
        _SHARING,
        "            self._in.record_event(buffer.used)\n",
        "",
        (f"{_ONE_WAY}[ipc]",),
    ),
    Mutant(
        "nothing waits for a pull",
        _SHARING,
        "            current.wait_stream(self._in)\n",
        "",
        _on("ipc", "copies"),
    ),
    Mutant(
        "a pulled tensor is freed before it was read",
        _SHARING,
        "            copy.record_stream(current)\n",
        "",
        _on("ipc", "kernels of rank 1"),
    ),
    Mutant(
        "a copy to the host does not wait for what computes its tensor",
        _COPIES,
        "        self._down.wait_stream(self._runtime.current_stream(self._device))\n",
        "",
        _on("shm", "kernels"),
    ),
    Mutant(
        "nothing waits for a copy to the device",
        _COPIES,
        "        current.wait_event(copied)\n",
        "",
        _on("shm", "copies"),
    ),
    Mutant(
        "a tensor that arrived is freed before it was read",
        _COPIES,
        "        copy.record_stream(current)\n",
        "",
        _on("shm", "kernels of rank 1"),
    ),
    Mutant(
        "a message leaves before it was copied to the host",
        _COPIES,
        "                mark.synchronize()\n",
        "                pass\n",
        _on("shm", "copies"),
    ),
    Mutant(
        "the device does not know the slots that it writes",
        "megatron_ext.transport.native_transport",
        "                    self._memory += [link.slots, link.peer_slots]\n",
        "                    self._memory += [link.slots]\n",
        (f"{_MEMORY}::test_no_copy_of_a_message_makes_the_host_wait[shm-8]",),
    ),
    Mutant(
        "the device does not know the slots that it reads",
        "megatron_ext.transport.native_transport",
        "                    self._memory += [link.slots, link.peer_slots]\n",
        "                    self._memory += [link.peer_slots]\n",
        (f"{_MEMORY}::test_no_copy_of_a_message_makes_the_host_wait[shm-8]",),
    ),
    Mutant(
        "what arrives over TCP is not where the device knows memory",
        "megatron_ext.transport.native_transport",
        "        if for_device and num_over_tcp > 0:",
        "        if False:",
        (f"{_MEMORY}::test_no_copy_of_a_message_makes_the_host_wait[tcp-8]",),
    ),
    Mutant(
        "memory is unregistered while a copy uses it",
        _STAGING,
        "        if all(have_ended):\n",
        "        if have_ended:\n",
        (f"{_MEMORY}::test_memory_is_registered_as_long_as_a_copy_may_use_it",),
    ),
    Mutant(
        "what is written into a slot is not kept until it was copied",
        _STAGING,
        "        self._sends.after(copied, send, (source, copy))\n",
        "        self._sends.after(copied, send, None)\n",
        _on("shm", "copies"),
    ),
    Mutant(
        "after an error memory is freed before its copy has ended",
        "megatron_ext.transport.afterwards",
        "                copied.wait()\n                if self.error is None:\n",
        "                if self.error is None:\n                    copied.wait()\n",
        (f"{_MEMORY}::test_after_an_error_memory_is_kept_until_its_copy_has_ended",),
    ),
    Mutant(
        "nothing waits for a receive",
        _TORCH,
        "            if timeout_s is None or not self._matches_tags:\n"
        "                timeout_s = self._timeout_s\n                work.wait()\n",
        "            if timeout_s is None or not self._matches_tags:\n                pass\n",
        _on("torch", "anything", "copies of rank 0"),
    ),
    Mutant(
        "receives are started two calls early",
        _TORCH,
        "self._waiting[0].after <= self._calls:",
        "self._waiting[0].after <= self._calls + 2:",
        (_SCHEDULE,),
    ),
    Mutant(
        "the host runs ahead without a bound",
        "megatron_ext.runtime.executor",
        "            run_ahead.wait_until(AHEAD - 1)\n",
        "            pass\n",
        (f"{_RUN_AHEAD}::test_memory_is_that_of_the_table_and_of_two_actions",),
    ),
    Mutant(
        "an action ends before the device has computed it",
        "megatron_ext.runtime.ordering",
        "                end.synchronize()\n",
        "",
        (f"{_RUN_AHEAD}::test_memory_is_that_of_the_table_and_of_two_actions",),
    ),
    Mutant(
        "an order chooses when the last action is launched",
        "megatron_ext.runtime.ordering",
        "        while len(self._running) >= AHEAD:\n            self._wait()\n"
        "        self.policy.progress.began()\n"
        "        while self._running and not self.policy.looks_ahead():\n",
        "        self.policy.progress.began()\n        while False:\n",
        (_LOOKING_AHEAD,),
    ),
    Mutant(
        "an order jumps while its last action runs",
        "megatron_ext.runtime.ordering",
        "while self._running and not self.policy.looks_ahead():",
        "while False:",
        (_LOOKING_AHEAD,),
    ),
    Mutant(
        "a message for a dynamic order arrives before its tensor",
        "megatron_ext.transport.afterwards",
        "                copied.wait()\n",
        "",
        (_LOOKING_AHEAD,),
    ),
    Mutant(
        "two ranks make their group alone",
        _TORCH,
        "        group: Any = dist.new_group(sorted(members), timeout=timeout, backend=backend)\n"
        "        if members in sets_of_rank:\n",
        "        if members not in sets_of_rank:\n            continue\n"
        "        group = dist.new_group(\n"
        "            sorted(members), timeout=timeout, backend=backend,\n"
        "            use_local_synchronization=True,\n"
        "        )\n"
        "        if True:\n",
        (_SCHEDULE,),
    ),
)
