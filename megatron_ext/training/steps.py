"""One micro-batch of GPT or BERT: fetch it, run the model on it, reduce its loss.

The functions have the signatures that megatron.core's schedules call. Follows `pretrain_gpt.py`,
`pretrain_bert.py` and `get_batch_on_this_tp_rank` of `megatron/training/utils.py`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.utils import get_attr_wrapped_model

from megatron_ext import devices
from megatron_ext.errors import UserError
from megatron_ext.training.data import fields_read

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from megatron_ext.training.trainer_arguments import Model

__all__ = ["forward_step", "gpt_batch", "run_gpt", "sum_losses"]

_BERT_FIELDS = ("text", "types", "labels", "is_random", "loss_mask", "padding_mask")


def forward_step(model: Model, args: Namespace, config: TransformerConfig) -> Callable[..., Any]:
    """Make the `forward_step_func` of a model: `(data_iterator, chunk) -> (output, loss_func)`."""
    if model == "gpt":
        return partial(_gpt_step, args, config)
    return _bert_step


def _gpt_step(
    args: Namespace,
    config: TransformerConfig,
    data_iterator: Iterator[Any] | None,
    chunk: torch.nn.Module,
) -> tuple[torch.Tensor, Callable[..., Any]]:
    batch = gpt_batch(args, config, data_iterator, get_attr_wrapped_model(chunk, "vp_stage"))
    return run_gpt(chunk, batch), partial(_gpt_loss, args, batch.get("loss_mask"))


def run_gpt(run: Callable[..., Any], batch: Mapping[str, torch.Tensor]) -> Any:
    """Call a chunk, or what plans for one, with the fields of a micro-batch that it has."""
    return run(
        batch.get("tokens"),
        batch.get("position_ids"),
        batch.get("attention_mask"),
        labels=batch.get("labels"),
        loss_mask=batch.get("loss_mask"),
    )


def gpt_batch(
    args: Namespace,
    config: TransformerConfig,
    data_iterator: Iterator[Any] | None,
    vp_stage: int | None,
) -> dict[str, torch.Tensor]:
    """Fetch the fields of this stage; one tensor-parallel rank reads and broadcasts them."""
    fields = fields_read(args, config, vp_stage)
    if not fields:
        return {}
    sample = next(data_iterator) if data_iterator is not None else None
    device = devices.current().torch_device(args.local_rank)
    shape = (args.micro_batch_size, args.seq_length)
    kinds = {
        "loss_mask": (shape, torch.float32),
        "attention_mask": ((shape[0], 1, shape[1], shape[1]), torch.bool),
    }
    batch = {}
    for field in fields:
        if sample is not None:
            batch[field] = sample[field].to(device, non_blocking=True)
        else:
            size, dtype = kinds.get(field, (shape, torch.int64))
            batch[field] = torch.empty(size, dtype=dtype, device=device)
        dist.broadcast(
            batch[field],
            parallel_state.get_tensor_model_parallel_src_rank(),
            group=parallel_state.get_tensor_model_parallel_group(),
        )
    return batch


def _gpt_loss(
    args: Namespace, loss_mask: torch.Tensor | None, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum a micro-batch's losses; the schedule divides by the number of tokens."""
    loss, tokens, report = sum_losses(loss_mask, output)
    if args.check_for_nan_in_loss_and_grad and not loss.isfinite():
        raise UserError(
            f"the loss of a micro-batch is {loss.item()}: lower --lr, or look at the data "
            "that this iteration reads"
        )
    return loss, tokens, report


def sum_losses(
    loss_mask: torch.Tensor | None, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of a micro-batch's losses, the number of its tokens, and both as a report.

    Args:
        loss_mask: [b, s]; 1 where a token counts.
        output: [b, s], the loss of each token.
    """
    assert loss_mask is not None, "only the last stage has a loss"
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().clone().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), tokens.view(1)])}


def _bert_step(
    data_iterator: Iterator[Any] | None, chunk: torch.nn.Module
) -> tuple[torch.Tensor, Callable[..., Any]]:
    sample = next(data_iterator) if data_iterator is not None else None
    batch = tensor_parallel.broadcast_data(list(_BERT_FIELDS), sample, torch.int64)
    output = chunk(
        batch["text"],
        batch["padding_mask"],
        tokentype_ids=batch["types"],
        lm_labels=batch["labels"],
    )
    return output, partial(_bert_loss, batch["loss_mask"].float(), batch["is_random"])


def _bert_loss(
    loss_mask: torch.Tensor, is_random: torch.Tensor, output: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the mean over the masked positions, plus the loss of the sentence-order head."""
    lm_losses, order_logits = output
    lm_loss = torch.sum(lm_losses.float().view(-1) * loss_mask.reshape(-1)) / loss_mask.sum()
    sop_loss = torch.nn.functional.cross_entropy(
        order_logits.view(-1, 2).float(), is_random.view(-1), ignore_index=-1
    )
    group = parallel_state.get_data_parallel_group()
    averaged = torch.stack([lm_loss.detach(), sop_loss.detach()])
    dist.all_reduce(averaged, group=group)
    averaged /= group.size()
    return lm_loss + sop_loss, {"lm loss": averaged[0], "sop loss": averaged[1]}
