"""The training loop: step, log, evaluate, save, in upstream's order.

Follows `train`, `train_step` and `evaluate` of `megatron/training/training.py`. Schedules, gradient
reduction, the optimizer and its learning-rate scheduler are megatron.core's, each looked up in its
module when it is used, so that patches act.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import distributed, parallel_state
from megatron.core import optimizer as core_optimizer
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer import AdamOptimizerConfig, MegatronOptimizer, SGDOptimizerConfig
from megatron.core.optimizer_param_scheduler import (
    OptimizerParamScheduler,
    get_canonical_lr_for_logging,
)
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker

from megatron_ext import devices
from megatron_ext.config import randomness
from megatron_ext.disaggregation import job as disaggregation
from megatron_ext.disaggregation.step import step_done
from megatron_ext.disaggregation.trainer import share_evaluation
from megatron_ext.runtime.folded import share_losses, share_mtp_losses
from megatron_ext.runtime.runtime import log_statistics
from megatron_ext.training.checkpoint import save_checkpoint
from megatron_ext.training.model import fill
from megatron_ext.training.training_log import Reporter, StepResult

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from megatron_ext.training.data import DataIterator, Iterators

__all__ = ["Trainer", "build_optimizer"]


def build_optimizer(
    args: Namespace, chunks: Sequence[torch.nn.Module]
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Make megatron.core's optimizer, and the scheduler of its learning rate."""
    config = fill(AdamOptimizerConfig if args.optimizer == "adam" else SGDOptimizerConfig, args)
    optimizer = core_optimizer.get_megatron_optimizer(
        config,
        list(chunks),
        config_overrides=core_optimizer.get_standard_config_overrides(config=config),
        use_gloo_process_groups=args.enable_gloo_process_groups,
    )
    # Counted in samples, whatever the flags count in.
    unit, scale = ("samples", 1) if args.train_samples else ("iters", args.global_batch_size)
    train = getattr(args, f"train_{unit}") * scale
    decay = (getattr(args, f"lr_decay_{unit}") or 0) * scale or train
    warmup = getattr(args, f"lr_warmup_{unit}") * scale
    if args.lr_warmup_fraction is not None:
        warmup = args.lr_warmup_fraction * decay
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=train,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
        wsd_decay_steps=(getattr(args, f"lr_wsd_decay_{unit}") or 0) * scale or None,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )
    return optimizer, scheduler


@dataclass
class Trainer:
    """The objects of one training run, and its loop."""

    args: Namespace
    config: TransformerConfig
    chunks: list[Any]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    iterators: Iterators
    forward_step: Callable[..., Any]
    reporter: Reporter
    _gathering: bool = field(init=False)
    """Whether forward passes gather the parameters that the distributed optimizer updated."""

    def __post_init__(self) -> None:
        """Set the functions that schedules call around the backward pass."""
        args, config, chunks = self.args, self.config, self.chunks
        self._gathering = args.overlap_param_gather
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = distributed.finalize_model_grads
        if args.overlap_grad_reduce:
            config.no_sync_func = _one_or_all([chunk.no_sync for chunk in chunks])
            config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in chunks])

    def run(self) -> None:
        """Train to the end, then validate and test, unless `--exit-interval` ends it before."""
        args, iteration = self.args, self.args.iteration
        if args.do_train:
            iteration, finished = self._train(iteration)
            log_statistics()
            if not finished:
                return
        for wanted, iterator, what in (
            (args.do_valid, self.iterators.valid, "validation"),
            (args.do_test, self.iterators.test, "test"),
        ):
            if wanted:
                self._evaluate(iterator, f"iteration {iteration} on {what} set", iteration)

    def _train(self, iteration: int) -> tuple[int, bool]:
        """Run training steps; return the iteration reached and whether it was the last one."""
        args = self.args
        for chunk in self.chunks:
            chunk.train()
        self._gather(False, param_sync=False)  # nothing to gather before the first step
        self.reporter.clock.start(barrier=True)
        while iteration < args.train_iters:
            randomness.begin_iteration(iteration)
            result = self._step()
            if not result.skipped:
                self._gather(args.overlap_param_gather)
            iteration += 1
            args.consumed_train_samples += args.global_batch_size
            if not disaggregation.has_role("forward"):  # those know nothing to report
                self.reporter.step(iteration, result)
            if args.eval_interval and iteration % args.eval_interval == 0 and args.do_valid:
                self._validate(iteration)
            leave = bool(args.exit_interval and iteration % args.exit_interval == 0)
            last = leave or iteration == args.train_iters
            if args.save and (last or iteration % args.save_interval == 0):
                self._save(iteration)
            if leave:
                return iteration, False
        self._gather(False)
        return iteration, True

    def _step(self) -> StepResult:
        args = self.args
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = self._forward_backward(self.iterators.train, forward_only=False)
        if disaggregation.has_role("forward"):  # whether the step counts is known elsewhere
            step_done(self.chunks, updated=False)
            return StepResult({}, False, None, None, 1.0)
        succeeded, grad_norm, _ = self.optimizer.step()
        # Stages without trainable parameters know none of these.
        succeeded = self._reduce(float(succeeded), dist.ReduceOp.MIN) == 1.0
        grad_norm = self._maximum(grad_norm)
        if succeeded:
            self.scheduler.step(increment=args.global_batch_size)
        if disaggregation.current() is not None:
            step_done(self.chunks, updated=succeeded)
        stub = self.optimizer.is_stub_optimizer
        share_mtp_losses()
        losses = {key: total[0] / total[1] for key, total in _sum_losses(reports).items()}
        return StepResult(
            losses=share_losses(losses),
            skipped=not succeeded,
            grad_norm=grad_norm,
            learning_rate=self._maximum(get_canonical_lr_for_logging(self.optimizer.param_groups)),
            loss_scale=1.0 if stub else self.optimizer.get_loss_scale().item(),
        )

    def _forward_backward(self, data_iterator: DataIterator, *, forward_only: bool) -> Any:
        return schedules.get_forward_backward_func()(
            forward_step_func=self.forward_step,
            data_iterator=data_iterator,
            model=self.chunks,
            num_microbatches=get_num_microbatches(),
            seq_length=self.args.seq_length,
            micro_batch_size=self.args.micro_batch_size,
            forward_only=forward_only,
        )

    def _maximum(self, value: float | None) -> float | None:
        """Share a value of some model-parallel ranks with all; None if no rank has it."""
        found = self._reduce(-1.0 if value is None else float(value), dist.ReduceOp.MAX)
        return None if found == -1.0 else found

    def _reduce(self, value: float, operation: Any) -> float:
        device = devices.current().torch_device(self.args.local_rank)
        tensor = torch.tensor([value], dtype=torch.float32, device=device)
        dist.all_reduce(tensor, op=operation, group=parallel_state.get_model_parallel_group())
        return tensor.item()

    def _validate(self, iteration: int) -> None:
        """Evaluate between two training steps."""
        self.reporter.clock.stop()
        gathering = self._gathering
        self._gather(False)
        self._evaluate(self.iterators.valid, f"iteration {iteration}", iteration)
        self._gather(gathering)
        if self.args.num_experts is not None:
            clear_aux_losses_tracker()
        self.reporter.clock.start(barrier=True)

    def _evaluate(self, data_iterator: DataIterator, label: str, iteration: int) -> None:
        args = self.args
        totals: dict[str, torch.Tensor] = {}
        if not disaggregation.has_role("backward"):
            totals = self._evaluated(data_iterator)
        if disaggregation.current() is not None:
            totals = share_evaluation(self.chunks, totals)
        args.consumed_valid_samples += args.eval_iters * args.global_batch_size
        totals = share_losses(totals)
        losses = {key: (total[0] / total[1]).item() for key, total in totals.items()}
        self.reporter.evaluation(label, iteration, losses)

    def _evaluated(self, data_iterator: DataIterator) -> dict[str, torch.Tensor]:
        """Return (sum, count) of each loss over all rounds of an evaluation."""
        totals: dict[str, torch.Tensor] = {}
        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad():
            for _ in range(self.args.eval_iters):
                reports = self._forward_backward(data_iterator, forward_only=True)
                for key, total in _sum_losses(reports).items():
                    totals[key] = totals.get(key, torch.zeros_like(total)) + total
        for chunk in self.chunks:
            chunk.train()
        return totals

    def _gather(self, on: bool, *, param_sync: bool = True) -> None:
        """Enable the gather of updated parameters in forwards, or disable it and gather now."""
        if on == self._gathering:
            return
        self._gathering = on
        for chunk in self.chunks:
            if on:
                chunk.enable_forward_pre_hook()
            else:
                chunk.disable_forward_pre_hook(param_sync=param_sync)
        aligned = on and self.args.align_param_gather
        self.config.param_sync_func = (
            _one_or_all([chunk.start_param_sync for chunk in self.chunks]) if aligned else None
        )

    def _save(self, iteration: int) -> None:
        self.reporter.clock.stop()
        if self.args.overlap_param_gather:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
        save_checkpoint(self.args, iteration, self.chunks, self.optimizer, self.scheduler)
        self.reporter.clock.start(barrier=True)


def _one_or_all(functions: list[Any]) -> Any:
    """Give schedules the function of the only chunk, or a list with one for each chunk."""
    return functions[0] if len(functions) == 1 else functions


def _sum_losses(reports: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Sum micro-batch reports to (sum, count) for each loss; only the last stage has reports.

    A report of two elements is a sum over tokens and their number, over which replicas add up; one
    element is a mean that replicas share already.
    """
    sums = {}
    for key in reports[0] if reports else ():
        values = [report[key].view(-1) for report in reports]
        if values[0].numel() == 2:
            sums[key] = torch.vstack(values).sum(dim=0)
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            dist.all_reduce(sums[key], group=group)
        else:
            total = torch.cat(values).sum()
            sums[key] = torch.stack([total, torch.full_like(total, len(values))])
    return sums
