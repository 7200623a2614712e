"""The training loop: step, log, evaluate, save, in upstream's order.

Follows `train`, `train_step` and `evaluate` of `megatron/training/training.py`. Schedules, gradient
reduction, the optimizer and its learning-rate scheduler are megatron.core's, each looked up in its
module when it is used, so that patches act.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import Timers, distributed, parallel_state
from megatron.core import optimizer as core_optimizer
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_num_microbatches,
    update_num_microbatches,
)
from megatron.core.optimizer import AdamOptimizerConfig, MegatronOptimizer, SGDOptimizerConfig
from megatron.core.optimizer_param_scheduler import (
    OptimizerParamScheduler,
    get_canonical_lr_for_logging,
)
from megatron.core.pipeline_parallel import schedules
from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker

from megatron_ext import devices
from megatron_ext.schedules.runtime.folded import share_losses, share_mtp_losses
from megatron_ext.training.checkpoint import save_checkpoint
from megatron_ext.training.model import fill
from megatron_ext.training.report import Reporter, StepResult

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from megatron_ext.training.data import DataIterator, Iterators

__all__ = ["Trainer", "build_optimizer"]


def build_optimizer(
    args: Namespace, chunks: Sequence[torch.nn.Module], timers: Timers
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Make megatron.core's optimizer, and the scheduler of its learning rate and weight decay."""
    kind = AdamOptimizerConfig if args.optimizer == "adam" else SGDOptimizerConfig
    config = fill(kind, args, timers=timers)
    optimizer = core_optimizer.get_megatron_optimizer(
        config,
        list(chunks),
        config_overrides=core_optimizer.get_standard_config_overrides(config=config),
        use_gloo_process_groups=args.enable_gloo_process_groups,
    )
    return optimizer, _build_scheduler(args, optimizer)


def _build_scheduler(args: Namespace, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Count warm-up and decay in samples, whatever the flags counted in."""
    unit, scale = ("samples", 1)
    if not args.train_samples:
        unit, scale = ("iters", args.global_batch_size)
    train = getattr(args, f"train_{unit}")
    decay = (getattr(args, f"lr_decay_{unit}") or train) * scale
    warmup = getattr(args, f"lr_warmup_{unit}") * scale
    if args.lr_warmup_fraction is not None:
        warmup = args.lr_warmup_fraction * decay
    final = getattr(args, f"lr_wsd_decay_{unit}")
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=train * scale,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
        wsd_decay_steps=None if final is None else final * scale,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )


@dataclass
class Trainer:
    """Everything that one run consists of, and the loop over it."""

    args: Namespace
    config: TransformerConfig
    chunks: list[Any]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    iterators: Iterators
    forward_step: Callable[..., Any]
    timers: Timers
    reporter: Reporter
    _gathering: bool = field(default=False, init=False)
    _param_sync_func: Any = field(default=None, init=False)

    def run(self) -> None:
        """Train to the end, then validate and test, unless an exit flag ends the run before."""
        args, iteration = self.args, self.args.iteration
        if args.do_train:
            iteration, finished = self._train(iteration)
            if not finished:
                return
            if args.save and iteration > args.iteration and iteration % args.save_interval:
                self._save(iteration)
        for wanted, iterator, what in (
            (args.do_valid, self.iterators.valid, "validation"),
            (args.do_test, self.iterators.test, "test"),
        ):
            if wanted and args.eval_iters:
                self._evaluate(iterator, f"iteration {iteration} on {what} set", iteration)

    def _train(self, iteration: int) -> tuple[int, bool]:
        """Run training steps; tells the iteration reached and whether no exit flag ended it."""
        args, started = self.args, time.monotonic()
        self._connect()
        for chunk in self.chunks:
            chunk.train()
        get_rerun_state_machine().current_iteration = iteration
        forward_backward = schedules.get_forward_backward_func()
        if self._gathers:  # nothing to gather before the first successful step
            self._pause_gathering(param_sync=False)
        self.timers("interval-time", log_level=0).start(barrier=True)
        while iteration < args.train_iters:
            self._update_batch_size(iteration)
            result = self._step(forward_backward, iteration)
            if self._gathers and not self._gathering and not result.skipped:
                self._resume_gathering()
            iteration += 1
            args.consumed_train_samples += get_current_global_batch_size()
            self.reporter.step(iteration, result)
            if args.eval_interval and iteration % args.eval_interval == 0 and args.do_valid:
                self._validate(iteration)
            saved = bool(args.save and iteration % args.save_interval == 0)
            if saved:
                self._save(iteration)
            if self._should_exit(iteration, started):
                if args.save and not saved:
                    self._save(iteration)
                return iteration, False
        if self._gathering:
            self._pause_gathering()
        return iteration, True

    def _update_batch_size(self, iteration: int) -> None:
        """Follow the ramp-up; the last state with a smaller batch is saved."""
        consumed, before = self.args.consumed_train_samples, get_num_microbatches()
        update_num_microbatches(consumed, consistency_check=False)
        if get_num_microbatches() != before and iteration and self.args.save:
            self._save(iteration)
        update_num_microbatches(consumed, consistency_check=True)

    def _connect(self) -> None:
        """Hand the schedules what they call around the backward pass."""
        args, config, chunks = self.args, self.config, self.chunks

        def one_or_all(functions: list[Any]) -> Any:
            return functions[0] if len(functions) == 1 else functions

        config.grad_scale_func = self.optimizer.scale_loss
        config.timers = self.timers
        if args.overlap_grad_reduce:
            config.no_sync_func = one_or_all([chunk.no_sync for chunk in chunks])
            if args.align_grad_reduce:
                config.grad_sync_func = one_or_all([chunk.start_grad_sync for chunk in chunks])
        if args.overlap_param_gather and args.align_param_gather:
            self._param_sync_func = one_or_all([chunk.start_param_sync for chunk in chunks])
        config.finalize_model_grads_func = distributed.finalize_model_grads

    def _step(self, forward_backward: Callable[..., Any], iteration: int) -> StepResult:
        args = self.args
        reports: list[Mapping[str, torch.Tensor]] = []
        rerun = get_rerun_state_machine()
        while rerun.should_run_forward_backward(self.iterators.train):
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            reports = forward_backward(
                forward_step_func=self.forward_step,
                data_iterator=self.iterators.train,
                model=self.chunks,
                num_microbatches=get_num_microbatches(),
                seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size,
                forward_only=False,
            )
        checkpoint, leave, exit_code = rerun.should_checkpoint_and_exit()
        if checkpoint and args.save:
            self._save(iteration)
        if leave:
            raise SystemExit(exit_code)
        self.timers("optimizer", log_level=1).start(barrier=args.barrier_with_L1_time)
        succeeded, grad_norm, num_zeros = self.optimizer.step()
        self.timers("optimizer").stop()
        # Stages without trainable parameters know none of these.
        succeeded = self._reduce(float(succeeded), dist.ReduceOp.MIN) == 1.0
        grad_norm = self._maximum(grad_norm)
        if args.log_num_zeros_in_grad:
            num_zeros = self._maximum(num_zeros)
        if succeeded:
            self.scheduler.step(
                increment=get_num_microbatches() * args.micro_batch_size * args.data_parallel_size
            )
        stub = self.optimizer.is_stub_optimizer
        share_mtp_losses()
        losses = {key: total[0] / total[1] for key, total in _sum_losses(reports).items()}
        return StepResult(
            losses=share_losses(losses),
            skipped=not succeeded,
            grad_norm=grad_norm,
            num_zeros=num_zeros,
            learning_rate=self._maximum(get_canonical_lr_for_logging(self.optimizer.param_groups)),
            loss_scale=1.0 if stub else self.optimizer.get_loss_scale().item(),
        )

    def _maximum(self, value: float | None) -> float | None:
        """Share a value of some model-parallel ranks with all of them; None if no rank has it."""
        found = self._reduce(-1.0 if value is None else float(value), dist.ReduceOp.MAX)
        return None if found == -1.0 else found

    def _reduce(self, value: float, operation: Any) -> float:
        device = devices.current().torch_device(self.args.local_rank)
        tensor = torch.tensor([value], dtype=torch.float32, device=device)
        dist.all_reduce(tensor, op=operation, group=parallel_state.get_model_parallel_group())
        return tensor.item()

    def _validate(self, iteration: int) -> None:
        self.timers("interval-time").stop()
        gathering = self._gathering
        if gathering:
            self._pause_gathering()
        self._evaluate(self.iterators.valid, f"iteration {iteration}", iteration)
        if gathering:
            self._resume_gathering()
        if self.args.num_experts is not None:
            clear_aux_losses_tracker()
        self.timers("interval-time", log_level=0).start(barrier=True)

    def _evaluate(self, data_iterator: DataIterator, label: str, iteration: int) -> None:
        args = self.args
        for chunk in self.chunks:
            chunk.eval()
        rerun = get_rerun_state_machine()
        mode = rerun.get_mode()
        rerun.set_mode(RerunMode.DISABLED)
        per_round = args.micro_batch_size * args.data_parallel_size
        totals: dict[str, torch.Tensor] = {}
        self.config.timers = None
        with torch.no_grad():
            for _ in range(args.eval_iters):
                reports = schedules.get_forward_backward_func()(
                    forward_step_func=self.forward_step,
                    data_iterator=data_iterator,
                    model=self.chunks,
                    num_microbatches=args.global_batch_size // per_round,
                    seq_length=args.seq_length,
                    micro_batch_size=args.micro_batch_size,
                    forward_only=True,
                )
                for key, total in _sum_losses(reports).items():
                    totals[key] = totals.get(key, torch.zeros_like(total)) + total
                args.consumed_valid_samples += args.global_batch_size
        self.config.timers = self.timers
        for chunk in self.chunks:
            chunk.train()
        rerun.set_mode(mode)
        totals = share_losses(totals)
        losses = {key: (total[0] / total[1]).item() for key, total in totals.items()}
        self.reporter.evaluation(label, iteration, losses)

    @property
    def _gathers(self) -> bool:
        """Whether forward passes gather the parameters that the optimizer updated."""
        return bool(self.args.use_distributed_optimizer and self.args.overlap_param_gather)

    def _pause_gathering(self, *, param_sync: bool = True) -> None:
        for chunk in self.chunks:
            chunk.disable_forward_pre_hook(param_sync=param_sync)
        self.config.param_sync_func = None
        self._gathering = False

    def _resume_gathering(self) -> None:
        for chunk in self.chunks:
            chunk.enable_forward_pre_hook()
        self.config.param_sync_func = self._param_sync_func
        self._gathering = True

    def _save(self, iteration: int) -> None:
        self.timers("interval-time").stop()
        if self._gathers:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
        save_checkpoint(self.args, iteration, self.chunks, self.optimizer, self.scheduler)
        self.timers("interval-time", log_level=0).start(barrier=True)

    def _should_exit(self, iteration: int, started: float) -> bool:
        args = self.args
        if args.exit_interval and iteration % args.exit_interval == 0:
            return True
        if not args.exit_duration_in_mins:
            return False
        late = (time.monotonic() - started) / 60.0 > args.exit_duration_in_mins
        device = devices.current().torch_device(args.local_rank)
        flag = torch.tensor([int(late)], dtype=torch.int, device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())


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
