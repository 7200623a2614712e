"""Entry point of the embedded trainer: `pretrain_gpt.py` and `pretrain_bert.py` without a tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model

from megatron_ext.disaggregation import job as disaggregation
from megatron_ext.disaggregation import worlds
from megatron_ext.disaggregation.trainer import shared_progress
from megatron_ext.training.board import make_writer
from megatron_ext.training.checkpoint import check_save_directory, load_checkpoint
from megatron_ext.training.data import build_iterators, build_tokenizer, dataset_config
from megatron_ext.training.initialize import agreed, initialize
from megatron_ext.training.loop import Trainer, build_optimizer
from megatron_ext.training.model import build_model, transformer_config
from megatron_ext.training.steps import forward_step
from megatron_ext.training.trainer_arguments import Model, parse
from megatron_ext.training.training_log import Reporter

__all__ = ["main"]


def main(model: Model, argv: Sequence[str]) -> None:
    """Train a model as upstream's script would with the same flags.

    Every process of the job calls this; RANK, WORLD_SIZE and LOCAL_RANK identify it, as `torchrun`
    sets them. A job of one process needs no launcher.

    Args:
        model: `gpt` or `bert`.
        argv: Upstream's flags and ours, without the name of a script.

    Raises:
        UserError: The flags, the data or the checkpoint are unusable. Before the processes are
            connected all of them raise it, afterwards only rank 0.
        SystemExit: On the other ranks in the latter case, with code 2.
    """
    args = parse(model, argv)
    config = transformer_config(args)
    initialize(args, model, config)
    with agreed():
        datasets = dataset_config(args, model, build_tokenizer(args))
        if args.save:
            check_save_directory(args.save)
    chunks = build_model(args, model, config)
    optimizer, scheduler = build_optimizer(args, chunks)
    if args.load:
        args.iteration = load_checkpoint(args, chunks, optimizer, scheduler)
    vars(args).update(shared_progress(vars(args)))
    iterators = build_iterators(args, model, config, datasets)
    with agreed():
        writer = make_writer(args)
    groups = get_attr_wrapped_model(chunks[0], "pg_collection")
    Trainer(
        args=args,
        config=config,
        chunks=chunks,
        optimizer=optimizer,
        scheduler=scheduler,
        iterators=iterators,
        forward_step=forward_step(model, args, config),
        reporter=Reporter(args, writer, groups),
    ).run()
    if writer is not None:
        writer.close()
    dist.barrier()
    if disaggregation.current() is not None:
        worlds.leave()
