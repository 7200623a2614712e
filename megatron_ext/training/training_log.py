"""The log of a run: upstream's lines on standard output and upstream's TensorBoard tags.

The last rank reports, because it has the loss. Format of `training_log` and
`evaluate_and_print_results` of `megatron/training/training.py`.
"""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.timers import Timer
from megatron.core.transformer.moe.moe_utils import track_moe_metrics
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_ext.disaggregation import job as disaggregation
from megatron_ext.tracing import scalars

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["Reporter", "StepResult", "say"]


@dataclass(frozen=True)
class StepResult:
    """One training step, as every rank knows it; only the last stage knows losses."""

    losses: Mapping[str, torch.Tensor]
    skipped: bool
    grad_norm: float | None
    learning_rate: float | None
    loss_scale: float


@dataclass
class Reporter:
    """Sums up steps between two log lines and writes the lines."""

    args: Namespace
    writer: SummaryWriter | None
    groups: Any
    clock: Timer = field(default_factory=lambda: Timer("interval-time"))
    """Runs while the run trains, and not while it evaluates or saves."""
    totals: dict[str, torch.Tensor] = field(default_factory=dict)
    advanced: int = 0
    skipped: int = 0
    nan: int = 0
    first: bool = True

    def step(self, iteration: int, result: StepResult) -> None:
        """Add one step; print a line after the first and after each log interval."""
        args = self.args
        self._accumulate(result)
        self._write_scalars(iteration, result)
        self._track_auxiliary_losses(iteration)
        if iteration % args.log_interval == 0 or self.first:
            self._print_line(iteration, result)
        if iteration % args.log_interval == 0 and scalars.are_asked_for(vars(args)):
            scalars.report(iteration, self.writer, None)
        self.first = False

    def evaluation(self, label: str, iteration: int, losses: Mapping[str, float]) -> None:
        """Print and write the losses of an evaluation."""
        line = f" validation loss at {label} | "
        for key, value in losses.items():
            perplexity = math.exp(min(20, value))
            line += f"{key} value: {value:.6E} | {key} PPL: {perplexity:.6E} | "
            self._scalar(f"{key} validation", value, iteration)
        rule = "-" * (len(line) + 1)
        for text in (rule, line, rule):
            say(text)

    def _accumulate(self, result: StepResult) -> None:
        self.skipped += result.skipped
        self.advanced += not result.skipped
        values = [loss.float().sum().item() for loss in result.losses.values()]
        if result.skipped:
            self.nan += not all(map(math.isfinite, values))
            return
        for key, loss in result.losses.items():
            self.totals[key] = self.totals.get(key, torch.zeros_like(loss)) + loss

    def _print_line(self, iteration: int, result: StepResult) -> None:
        """Print the first step of a run separately; it still counts for its interval."""
        args, reset = self.args, not self.first
        seconds = self.clock.elapsed(barrier=True, reset=reset) / (self.advanced + self.skipped)
        learning_rate = math.nan if result.learning_rate is None else result.learning_rate
        now = datetime.now()
        fields = [
            f" [{now:%Y-%m-%d %H:%M:%S.%f}] iteration {iteration:8d}/{args.train_iters:8d}",
            f"consumed samples: {args.consumed_train_samples:12d}",
            f"elapsed time per iteration (ms): {seconds * 1000.0:.1f}",
            f"learning rate: {learning_rate:.6E}",
            f"global batch size: {args.global_batch_size:5d}",
        ]
        means = {key: total.item() / max(1, self.advanced) for key, total in self.totals.items()}
        fields += [f"{key}: {mean:.6E}" for key, mean in means.items() if mean > 0.0]
        fields.append(f"loss scale: {result.loss_scale:.1f}")
        if result.grad_norm is not None:
            fields.append(f"grad norm: {result.grad_norm:.3f}")
        fields.append(f"number of skipped iterations: {self.skipped:3d}")
        fields.append(f"number of nan iterations: {self.nan:3d} |")
        say(" | ".join(fields))
        if reset:
            self.totals = {key: torch.zeros_like(total) for key, total in self.totals.items()}
            self.advanced = self.skipped = self.nan = 0

    def _write_scalars(self, iteration: int, result: StepResult) -> None:
        scalars = {
            "learning-rate": result.learning_rate,
            "batch-size": self.args.global_batch_size,
            **result.losses,
            "loss-scale": result.loss_scale,
            "grad-norm": result.grad_norm,
        }
        for tag, value in scalars.items():
            self._scalar(tag, value, iteration)

    def _scalar(self, tag: str, value: Any, iteration: int) -> None:
        """Write a value by iteration and by consumed samples, if there is a value."""
        if self.writer is not None and value is not None:
            self.writer.add_scalar(tag, value, iteration)
            self.writer.add_scalar(f"{tag} vs samples", value, self.args.consumed_train_samples)

    def _track_auxiliary_losses(self, iteration: int) -> None:
        """Let megatron.core reduce and write the losses of routers and of extra predictions."""
        args, scale = self.args, 1 / get_num_microbatches()
        if args.num_experts is not None:
            kinds = {
                "aux_loss": "load_balancing_loss",
                "seq_aux_loss": "seq_load_balancing_loss",
                "global_aux_loss": "global_load_balancing_loss",
            }
            # As upstream: a single name is searched as a string, so seq_aux_loss tracks both.
            names = [n for kind, n in kinds.items() if kind in args.moe_router_load_balancing_type]
            if args.moe_z_loss_coeff is not None:
                names.append("z_loss")
            track_moe_metrics(
                loss_scale=scale,
                iteration=iteration,
                writer=self.writer,
                total_loss_dict=self.totals,
                force_initialize=True,
                track_names=names,
                num_layers=args.num_layers,
                moe_layer_freq=args.moe_layer_freq,
                mtp_num_layers=args.mtp_num_layers,
                pg_collection=self.groups,
            )
        if args.mtp_num_layers is not None:
            MTPLossLoggingHelper.track_mtp_metrics(scale, iteration, self.writer, None, self.totals)


def say(line: str) -> None:
    """Print a line on the last rank, except on forward ranks, which stay silent."""
    if disaggregation.has_role("forward"):
        return
    if dist.get_rank() == dist.get_world_size() - 1:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
