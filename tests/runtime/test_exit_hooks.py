"""Transports that are closed leave nothing to do at exit: a process may open many."""

from __future__ import annotations

import gc
import weakref

from megatron_ext.config import active
from tests.ranks import run_ranks


def transports_leave_no_exit_hooks() -> None:
    import torch
    from torch import distributed as dist

    from megatron_ext import PipelineConfig
    from megatron_ext.config.active import Active
    from megatron_ext.runtime.connect import open_native, through_host

    dist.init_process_group("gloo")
    active.activate_configuration(Active(PipelineConfig()))
    for attempt in range(3):
        active.begin_attempt(attempt)
        transport = open_native(
            active.name_transport("pipeline"),
            dist.distributed_c10d._get_default_store(),
            dist.get_rank(),
            2,
            [1 - dist.get_rank()],
            wire="shm",
            slots=2,
            slot_bytes=64,
            timeout_s=30,
            device=torch.device("cpu"),
        )
        dist.barrier()
        through_host(transport, torch.device("cpu"), 30).close()
        closed = weakref.ref(transport)
        del transport
        gc.collect()
        assert closed() is None, "something keeps it for the exit of the process"


def test_transports_leave_no_exit_hooks() -> None:
    run_ranks(2, transports_leave_no_exit_hooks)
