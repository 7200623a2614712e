"""Micro-batches in slices give the losses and gradients of whole ones."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from functools import cache, partial
from itertools import accumulate, chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron_ext.schedules.table.memory import measure
from megatron_ext.upstream.releases import core_version
from tests.patches.single import start_parallel, without
from tests.ranks import RanksFailed, require_training, run_ranks
from tests.runtime import capture
from tests.runtime.capture import GPT, PP2, PP4, Captured, run_here, train
from tests.runtime.test_equality import assert_equal
from tests.training.helpers import LLAMA, MLA, MOE, bert_flags, gpt_dataset, report
from tests.training.helpers import train as run_script

UNCLIPPED = "--clip-grad 0 "
SLICES = "--pipeline-slices 4 "
slow = partial(pytest.param, marks=pytest.mark.slow)
TP_SP = "--tensor-model-parallel-size 2 --sequence-parallel "
# Large enough for a wrong balance to change the losses of later steps.
BALANCED = MOE.replace("1e-2", "1.0") + "--moe-z-loss-coeff 0.1 "
FULL = (
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
)
EIGHT_LAYERS = "--num-layers 8 --global-batch-size 16 "
PER_TOKEN = "--calculate-per-token-loss "
EP = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
BF16 = "--bf16 --no-masked-softmax-fusion "
FP16 = "--fp16 --no-masked-softmax-fusion --initial-loss-scale 1024 "
SHARDED = "--use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce "


@cache
def stock(num_ranks: int, flags: str) -> Captured:
    return train(num_ranks, flags)


@cache
def one_stage(num_ranks: int, flags: str) -> Captured:
    """Train one stage in slices, which no user may: there is no pipeline to fill."""
    flags = f"{flags}--pipeline-model-parallel-size 1 --pipeline-schedule 1f1b "
    return train(num_ranks, flags, run=one_stage_here)


def one_stage_here(*args: Any) -> Captured:
    """Train one stage that has a second copy of the embedding for what the last of several does.

    As in a pipeline, gradients of both copies are added up once all micro-batches are through.
    """
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import copy_tensor_model_parallel_attributes
    from megatron.core.utils import unwrap_model

    from megatron_ext.config import stages

    stages.check_ranks = lambda *_: None
    build, weight_of = GPTModel.__init__, GPTModel.shared_embedding_or_output_weight
    named, gradients = capture.named_weights, capture._gradients

    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        embedding, own = self.embedding, []
        if self.config.mtp_num_layers:
            self.of_last_stage = type(embedding)(
                self.config,
                self.vocab_size,
                self.max_sequence_length,
                position_embedding_type=self.position_embedding_type,
            )
            own = [*self.of_last_stage.parameters()]
            others = {"embedding": self.of_last_stage}

            def give_others(_module: Any, args: Any, kwargs: Any) -> Any:
                return args, kwargs | others

            give_others.runs_in_slices = True  # type: ignore[attr-defined]
            self.mtp.register_forward_pre_hook(give_others, with_kwargs=True)
        elif self.share_embeddings_and_output_weights:
            own = [
                torch.nn.Parameter(embedding.word_embeddings.weight.detach().clone())
            ]
            copy_tensor_model_parallel_attributes(
                own[0], embedding.word_embeddings.weight
            )
            self.output_layer.weight = own[0]
        self.both_ends = list(zip(embedding.parameters(), own, strict=False))

    def output_weight(self: Any) -> Any:
        return (
            weight_of(self)
            if self.output_layer.weight is None
            else self.output_layer.weight
        )

    def summed(chunks: list[Any], *args: Any) -> Any:
        for first, last in unwrap_model(chunks[0]).both_ends:
            first.main_grad += last.main_grad
            last.main_grad.copy_(first.main_grad)
        return gradients(chunks, *args)

    GPTModel.__init__, GPTModel.shared_embedding_or_output_weight = built, output_weight
    capture._gradients = summed
    capture.named_weights = lambda chunks: [
        (name.replace("of_last_stage.", "embedding."), parameter)
        for name, parameter in named(chunks)
    ]
    return run_here(*args)


def check_losses(found: Captured, whole: Captured, tolerance: float = 1e-6) -> None:
    assert "slices=" in found.tables[0]
    assert len(found.losses) == len(whole.losses) == 3
    for ours, theirs in zip(found.losses, whole.losses, strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance, abs=0)


@pytest.mark.short_s(12)
@pytest.mark.parametrize(
    ("num_ranks", "flags", "schedule"),
    [
        (2, PP2, "zb-h1"),
        (2, PP2, "zb-v"),
        (2, PP2, "zb-h1 --use-dpp"),
        slow(2, PP2, "1f1b"),
        slow(2, PP2, "gpipe"),
        slow(2, PP2, "1f1b --use-dpp"),
        slow(2, PP2, "interleaved"),
        slow(2, PP2, "dualpipe-v"),
        slow(4, PP4 + EIGHT_LAYERS, "zb-h1"),
        slow(4, PP4 + EIGHT_LAYERS, "zb-v --use-dpp"),
        slow(4, PP4 + EIGHT_LAYERS, "v-half"),
        slow(4, PP2 + EIGHT_LAYERS + "--overlap-grad-reduce ", "zb-h1"),
        slow(4, PP2 + TP_SP, "zb-v --use-dpp"),
        slow(2, PP2 + LLAMA + BALANCED, "zb-v --use-dpp"),
        slow(2, PP2 + LLAMA + BALANCED + FULL, "zb-h1"),
        slow(2, PP2 + MLA, "zb-v --use-dpp"),
        slow(2, PP2 + MLA + PER_TOKEN, "zb-h1"),
        slow(2, PP2 + LLAMA + "--recompute-granularity selective ", "zb-v"),
        slow(2, PP2 + BF16, "zb-v"),
        slow(2, PP2 + FP16, "zb-h1"),
        slow(4, PP2 + LLAMA + BALANCED + EP, "zb-v"),
        slow(4, PP2 + LLAMA + SHARDED, "zb-h1"),
        (4, PP4 + EIGHT_LAYERS, "bitpipe"),
        slow(4, PP4 + EIGHT_LAYERS, "dualpipe"),
    ],
)
def test_every_table_computes_what_one_stage_does(
    num_ranks: int, flags: str, schedule: str
) -> None:
    """Bit for bit, with the same slices; and the losses of whole micro-batches within rounding."""
    flags = GPT + UNCLIPPED + flags
    found = train(num_ranks, f"{flags}{SLICES}--pipeline-schedule {schedule} ")
    # Mirrored pipelines are two of half as many stages.
    stages = 4 if PP4 in flags and schedule not in ("bitpipe", "dualpipe") else 2
    alone = flags.replace(PP4, "").replace(PP2, "")
    assert_equal(found, one_stage(num_ranks // stages, alone + SLICES))
    check_losses(
        found, stock(num_ranks, flags), 1e-3 if flags.endswith((BF16, FP16)) else 1e-6
    )


@pytest.mark.short_s(12)
@pytest.mark.parametrize(
    "flags",
    [
        slow(LLAMA, id="llama"),
        pytest.param(LLAMA + TP_SP, id="tensor parallel"),
        pytest.param(LLAMA + BALANCED, id="experts"),
        pytest.param(MLA, id="latent, later tokens"),
        slow(
            MLA.replace("mtp-num-layers 1", "mtp-num-layers 2") + TP_SP,
            id="two later tokens",
        ),
        slow(LLAMA + BALANCED + PER_TOKEN, id="experts per token"),
        pytest.param(FULL, id="recomputed"),
        slow(LLAMA + PER_TOKEN, id="per token"),
        slow(LLAMA + "--eval-iters 1 --eval-interval 1 ", id="evaluated"),
        slow("--pipeline-transport shm ", id="shm"),
        slow(LLAMA + TP_SP + BALANCED, id="tensor parallel experts"),
    ],
)
def test_models(flags: str) -> None:
    num_ranks, flags = 4 if TP_SP in flags else 2, GPT + PP2 + flags
    found = train(num_ranks, f"{flags}{SLICES}--pipeline-schedule zb-h1 ")
    check_losses(found, stock(num_ranks, flags))


def test_what_megatron_logs_is_that_of_whole_micro_batches() -> None:
    """Losses of balance and of later tokens, with recomputed experts too."""
    flags = GPT + PP2 + MLA + BALANCED + FULL
    whole, sliced = (
        report(run_script(2, f"{flags}{slices}--pipeline-schedule zb-h1 "))
        for slices in ("", SLICES)
    )
    assert len(sliced) == len(whole) == 3
    for ours, theirs in zip(sliced, whole, strict=True):
        found, expected = (
            dict(re.findall(r"([a-z_0-9 ]+): (\S+) \|", line))
            for line in (ours, theirs)
        )
        assert (
            {" load_balancing_loss", " z_loss", " mtp_1 loss"}
            <= found.keys()
            == expected.keys()
        )
        for name, figure in expected.items():
            assert float(found[name]) == pytest.approx(float(figure), rel=2e-6), name


def test_checkpoints_are_those_of_whole_micro_batches(tmp_path: Path) -> None:
    """Trained in slices, saved, and continued whole; and the other way round."""
    flags = (
        GPT.replace("--train-iters 3", "--train-iters 4")
        + PP2
        + LLAMA
        + "--ckpt-format torch_dist "
    )
    zb, stop = "--pipeline-schedule zb-h1 ", "--save-interval 2 --exit-interval 2 "
    whole = train(2, flags)
    for first, second in ((SLICES + zb, ""), ("", SLICES + zb)):
        folder = tmp_path / f"from{len(first)}"
        saved = train(2, f"{flags}{first}{stop}--save {folder} ")
        loaded = train(2, f"{flags}{second}--load {folder} ")
        losses = saved.losses + loaded.losses
        assert len(losses) == len(whole.losses) == 4
        for ours, theirs in zip(losses, whole.losses, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6, abs=0)


@pytest.mark.tree
@pytest.mark.usefixtures("megatron_lm_path")
@pytest.mark.skipif(
    core_version().startswith("0.16"), reason="0.16 reads no packed documents"
)
def test_packed_documents_of_upstreams_script(tmp_path: Path) -> None:
    packed = "--dataloader-inter-document-masking --position-embedding-type rope "
    data = f"--data-path {gpt_dataset(tmp_path / 'text')} --data-cache-path {tmp_path} "
    flags = GPT.replace("--mock-data ", f"{data}--split 100,0,0 ") + PP2 + packed
    flags += "--micro-batch-size 1 --seq-length 32 --lr 1e-2 --train-iters 3 "
    found = train(2, f"{flags}{SLICES}--pipeline-schedule zb-h1 ")
    check_losses(found, stock(2, flags))
    whole = stock(2, flags.replace("--dataloader-inter-document-masking ", ""))
    assert found.losses[2] != pytest.approx(whole.losses[2], rel=1e-5), (
        "documents are told apart"
    )


SEQUENCE = 24
BOUNDS = (0, 11, 18, 24)
DOCUMENTS = [0, 5, 6, 11, 14, 14, 23, 24]  # one ends with a slice
PLAIN = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "masked_softmax_fusion": False,
}
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
    "moe_aux_loss_coeff": [0.3, 0.5],
    "moe_z_loss_coeff": 0.2,
    "add_bias_linear": False,
}
RECOMPUTED: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "grouped queries": {"num_query_groups": 2},
    "latent": {"mla": True},
    "fused latent": {"mla": True, "fused": True},
    "recomputed latent": {
        "mla": True,
        "recompute_granularity": "selective",
        "recompute_modules": ["mla_up_proj", "core_attn"],
    },
    "recomputed": RECOMPUTED,
    "recomputed attention": {"recompute_granularity": "selective"},
    "tied": {"tied": True},
    "experts": EXPERTS,
    "recomputed experts": EXPERTS
    | RECOMPUTED
    | {"moe_router_enable_expert_bias": True}
    | {"moe_router_score_function": "sigmoid"},
    "experts per token": EXPERTS | {"calculate_per_token_loss": True},
    "later tokens": {"mtp_num_layers": 2},
    "later tokens per token": {"mtp_num_layers": 2, "calculate_per_token_loss": True},
    "packed": {"num_query_groups": 2, "packed": True},
    "packed latent": {"mla": True, "packed": True} | RECOMPUTED,
    "packed fused latent": {"mla": True, "fused": True, "packed": True},
    "packed later tokens": {"mtp_num_layers": 1, "packed": True},
}


def fuse_positions() -> None:
    """Put products of torch in place of the kernels that turn queries and keys by position."""
    import torch
    from megatron.core.transformer import multi_latent_attention

    def turned(x: Any, cos: Any, sin: Any, sums: Any) -> Any:
        places = torch.arange(len(x))
        if sums is not None:  # each sequence begins with the first position
            places -= sums[torch.bucketize(places, sums, right=True) - 1]
        shape = (len(x), *[1] * (x.dim() - 2), -1)
        first, second = x.chunk(2, -1)
        across = torch.cat([-second, first], -1)
        return x * cos[places].view(shape) + across * sin[places].view(shape)

    def turn_queries(
        x: Any, cos: Any, sin: Any, plain: int, wide: int, sums: Any, *_: int
    ) -> Any:
        rest, positions = x.split([plain, wide], -1)
        return torch.cat([rest, turned(positions, cos, sin, sums)], -1)

    def turn_keys(
        x: Any, positions: Any, cos: Any, sin: Any, wide: int, plain: int, values: int, sums: Any,
        *_: int,
    ) -> tuple[Any, Any]:  # fmt: skip
        key, value = x.split([plain, values], -1)
        shared = turned(positions, cos, sin, sums).expand(*key.shape[:-1], wide)
        return torch.cat([key, shared], -1), value

    setattr(multi_latent_attention, "fused_apply_mla_rope_for_q", turn_queries)  # noqa: B010
    setattr(multi_latent_attention, "fused_apply_mla_rope_for_kv", turn_keys)  # noqa: B010


def worst_difference(
    settings: dict[str, Any], taken_out: tuple[str, ...] = ()
) -> float:
    """Return by how much a gradient of slices differs, over the largest entry of its weight's."""
    import torch
    from megatron.core import utils
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_ext.features.slices import sliced_compute
    from megatron_ext.features.slices.slice_steps import kept_state
    from tests.pipelines import use
    from tests.runtime import small_gpt

    small_gpt.SEQUENCE = SEQUENCE
    start_parallel()
    use(None)
    kept = kept_state()
    settings = dict(settings)
    is_packed = settings.pop("packed", False)
    if settings.pop("fused", False):
        fuse_positions()  # this process is a rank and ends
        settings |= {"rope_type": "yarn", "apply_rope_fusion": True}
    if settings.pop("te", False):
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        settings["core_attention"] = TEDotProductAttention
    model = small_gpt.build(use_ddp=False, **PLAIN, **settings)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # large enough for attention to prefer some tokens
            parameter.data.copy_(
                torch.randn(parameter.shape, generator=generator) * 0.2
            )
    tokens = torch.randint(
        small_gpt.VOCABULARY, (1 if is_packed else 2, SEQUENCE + 1), generator=generator
    )
    item: dict[str, Any] = {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "position_ids": torch.arange(SEQUENCE).expand(len(tokens), -1),
        "loss_mask": (tokens[:, 1:] % 5 > 0).float(),
        "attention_mask": torch.ones(
            len(tokens), 1, SEQUENCE, SEQUENCE, dtype=torch.bool
        ).triu(1),
    }
    if is_packed:
        item |= {
            "cu_seqlens": torch.tensor([DOCUMENTS], dtype=torch.int32),
            "attention_mask": None,
        }

    def loss_of(part: dict[str, torch.Tensor]) -> torch.Tensor:
        packed = None
        if is_packed and hasattr(utils, "flatten_batch_for_packed_sequences"):
            part = utils.flatten_batch_for_packed_sequences(
                dict(part)
            )  # as Megatron's script does
        if (sums := part.get("cu_seqlens")) is not None:
            longest = int(sums[0].diff().max())
            packed = PackedSeqParams(
                "thd", sums[0], sums[0], None, None, longest, longest
            )
        mask = part.get("attention_mask")
        losses = model(
            part["tokens"],
            part["position_ids"],
            mask,
            labels=part["labels"],
            loss_mask=part["loss_mask"],
            packed_seq_params=packed,
        )
        return (losses * part["loss_mask"]).sum() / item["loss_mask"].sum()

    loss_of(item).backward()
    whole = {name: p.grad.clone() for name, p in model.named_parameters()}
    counted = [
        b.clone() for name, b in model.named_buffers() if "tokens_per_expert" in name
    ]
    model.zero_grad()
    for name, buffer in model.named_buffers():
        if "tokens_per_expert" in name:
            buffer.zero_()
    del item["attention_mask"]  # as on stages without data
    parts = sliced_compute._cut(item, BOUNDS)
    ahead = kept.microbatches[0, 0].ahead
    for name in sliced_compute._LOOKS_AHEAD if settings.get("mtp_num_layers") else ():
        ahead[name] = [(item[name], item[name].sum())]
    with without(*taken_out):
        losses = []
        for number, part in enumerate(parts):
            with kept.of(0, 0, number, BOUNDS, backward=False):
                losses.append(loss_of(part))
        for number in reversed(range(len(parts))):
            with kept.of(0, 0, number, BOUNDS, backward=True):
                losses[number].backward()
    for buffer in chain.from_iterable(kept.microbatches[0, 0].attention.values()):
        assert buffer.tokens is buffer.gradient is None, "kept after backward"
    found = [
        buffer for name, buffer in model.named_buffers() if "tokens_per_expert" in name
    ]
    assert all(map(torch.equal, found, counted)), (
        "the bias of experts counts other tokens"
    )
    return max(
        ((p.grad - whole[name]).abs().max() / whole[name].abs().max()).item()
        for name, p in model.named_parameters()
    )


@pytest.mark.short_s(10)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_whole_sequence(name: str) -> None:
    [worst] = run_ranks(1, worst_difference, MODELS[name])
    assert worst < 2e-6


ANY_LENGTHS = (
    (0, 1),
    (0, 13),
    (0, 1, 2, 2, 2),  # a replica with a longer sample has as many slices
    (0, 7, 7),
    (0, 5, 9, 13),
    (0, 0, 0),
)


# Older releases of Megatron divide by the tokens that have a later one, so by 0 in shorter ones.
LONGER_THAN_TWO = tuple(bounds for bounds in ANY_LENGTHS if bounds[-1] not in (1, 2))


def differences_by_length(
    settings: dict[str, Any], documents: bool, cuts: tuple[tuple[int, ...], ...]
) -> list[float]:
    """Return the worst difference of a gradient for each of the cuts."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_ext.features.slices import sliced_compute
    from megatron_ext.features.slices.slice_steps import kept_state
    from tests.pipelines import use
    from tests.runtime import small_gpt

    small_gpt.SEQUENCE = SEQUENCE
    start_parallel()
    use(None)
    kept = kept_state()
    model = small_gpt.build(use_ddp=False, **{**PLAIN, **settings})

    def loss_of(part: dict[str, Any], packed: Any) -> Any:
        losses = model(
            part["tokens"],
            part["position_ids"],
            None,
            labels=part["labels"],
            loss_mask=part["loss_mask"],
            packed_seq_params=packed,
        )
        return (losses * part["loss_mask"]).sum()

    worst = []
    for bounds in cuts:
        length = bounds[-1]
        tokens = torch.arange(length)[None] * 7 % small_gpt.VOCABULARY
        item = {"tokens": tokens, "labels": tokens, "loss_mask": torch.ones(1, length)}
        item["position_ids"] = torch.arange(length)[None]
        packed = None
        if documents:
            # The first and the last sequence have no tokens.
            sums = torch.tensor([0, 0, length // 3, length, length], dtype=torch.int32)
            packed = PackedSeqParams("thd", sums, sums, None, None, length, length)
        model.zero_grad()
        expected = {}
        if length > 0:
            loss_of(item, packed).backward()
            expected = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        if settings.get("mtp_num_layers"):
            ahead = kept.microbatches[0, 0].ahead
            for field_name in sliced_compute._LOOKS_AHEAD:
                ahead[field_name] = [(item[field_name], item[field_name].sum())]
        losses = []
        for number, part in enumerate(sliced_compute._cut(item, bounds)):
            with kept.of(0, 0, number, bounds, backward=False):
                losses.append(loss_of(part, packed))
        for number in reversed(range(len(losses))):
            with kept.of(0, 0, number, bounds, backward=True):
                losses[number].backward()
        kept.clear()
        differences = []
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            difference = gradient - expected.get(name, torch.zeros_like(gradient))
            largest = expected.get(name, torch.ones(1)).abs().max()
            differences.append((difference.abs().max() / largest).item())
        worst.append(max(differences))
    return worst


@pytest.mark.parametrize(
    ("name", "documents"),
    [
        ("grouped queries", False),
        slow("latent", False),
        ("recomputed experts", False),
        ("later tokens", False),
        slow("experts per token", False),
        ("grouped queries", True),
        slow("recomputed", True),
    ],
)
def test_slices_of_any_length_and_empty_ones(name: str, documents: bool) -> None:
    cuts = ANY_LENGTHS
    if "mtp_num_layers" in MODELS[name]:
        cuts = LONGER_THAN_TWO
    [worst] = run_ranks(1, differences_by_length, MODELS[name], documents, cuts)
    for bounds, difference in zip(cuts, worst, strict=True):
        assert difference < 2e-6, bounds  # also false if it is not a number


def cut_packed_sequences() -> None:
    """Compare the bounds that attention gets with those of a search through all sequences."""
    import torch
    from hypothesis import given, settings
    from hypothesis import strategies as st
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_ext.features.slices.slice_steps import kept_state
    from tests.pipelines import use

    use(None)
    kept = kept_state()

    @settings(max_examples=200, deadline=None)
    @given(
        st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
        st.integers(0, 3),
        st.data(),
    )
    def check(lengths: list[int], padding: int, data: st.DataObject) -> None:
        documents = [0, *accumulate(lengths)]
        num_tokens = documents[-1] + padding  # behind all sequences
        begin = data.draw(st.integers(0, num_tokens - 1))
        end = data.draw(st.integers(begin + 1, num_tokens))
        sums = torch.tensor(documents, dtype=torch.int32)
        whole = PackedSeqParams(
            "thd", sums, sums, None, None, max(lengths), max(lengths)
        )
        kept.clear()
        with kept.of(0, 0, 0, (begin, end, num_tokens), backward=False):
            assert kept.running is not None
            kept.running._keep_packed(whole)
            packed, first = kept.running._packed_in_slice(whole)
        expected, firsts = [], []
        for document_begin, document_end in pairwise(documents):
            num_queries = min(document_end, end) - max(document_begin, begin)
            if num_queries > 0:
                expected.append((num_queries, min(document_end, end) - document_begin))
                firsts.append(document_begin)
        widths = zip(
            packed.cu_seqlens_q.diff().tolist(),
            packed.cu_seqlens_kv.diff().tolist(),
            strict=True,
        )
        assert [both for both in widths if both != (0, 0)] == expected
        assert first == (firsts[0] if firsts else begin)
        assert packed.max_seqlen_q == max([0, *(queries for queries, _ in expected)])
        assert packed.max_seqlen_kv == max([0, *(keys for _, keys in expected)])

    check()


def test_packed_sequences_are_cut_where_slices_are() -> None:
    run_ranks(1, cut_packed_sequences)


def read_after_freeing() -> list[float]:
    """Read two slices, the first of whose keys are freed in between, as by recomputation."""
    import torch

    from megatron_ext.features.slices.slice_steps import kept_state
    from tests.pipelines import use

    use(None)
    layer, kept = torch.nn.Identity(), kept_state()
    first = torch.ones(2, 1, 1, 1)
    with kept.of(0, 0, 0, (0, 2, 3), backward=False):
        assert kept.running is not None
        kept.running.with_earlier(layer, first, first)
    first.untyped_storage().resize_(0)
    last = torch.zeros(1, 1, 1, 1)
    with kept.of(0, 0, 1, (0, 2, 3), backward=False):
        assert kept.running is not None
        return kept.running.with_earlier(layer, last, last)[0].flatten().tolist()


def test_keys_outlive_the_memory_of_their_layer() -> None:
    assert run_ranks(1, read_after_freeing) == [[1.0, 1.0, 0.0]]


def shared_storages() -> None:
    """All slices read one buffer, also those whose backward runs after it was written again."""
    import torch

    from megatron_ext.errors import ScheduleError
    from megatron_ext.features.slices.slice_steps import kept_state
    from tests.pipelines import use

    use(None)
    layer, kept = torch.nn.Identity(), kept_state()
    bounds = (0, 5, 6, 11)
    leaves = torch.randn(11, 2, 3, requires_grad=True)
    outputs, storages = [], set()
    for number, (begin, end) in enumerate(pairwise(bounds)):
        with kept.of(0, 0, number, bounds, backward=False):
            assert kept.running is not None
            keys, values = kept.running.with_earlier(
                layer, leaves[begin:end], leaves[begin:end]
            )
        storages |= {
            keys.untyped_storage().data_ptr(),
            values.untyped_storage().data_ptr(),
        }
        assert keys._base is None
        # The product saves the keys, and the buffer is written again before its backward.
        outputs.append((keys * keys * (number + 1)).sum() + values.sum())
    assert len(storages) == 2
    for number in reversed(range(3)):
        with kept.of(0, 0, number, bounds, backward=True):
            outputs[number].backward()
    [(key_buffer, value_buffer)] = kept.microbatches[0, 0].attention.values()
    assert key_buffer.tokens is value_buffer.gradient is None, "kept after the backward"
    reads = torch.tensor([3.0] * 5 + [2.0] + [1.0] * 5)
    weights = torch.tensor([6.0] * 5 + [5.0] + [3.0] * 5)
    expected = 2 * leaves * weights[:, None, None] + reads[:, None, None]
    torch.testing.assert_close(leaves.grad, expected.detach())
    one_token = torch.ones(1, 2, 3)  # which would spread over the whole slice
    with kept.of(0, 1, 0, bounds, backward=False):
        assert kept.running is not None
        with pytest.raises(
            ScheduleError, match="Identity has keys for 1 and values for 5 tokens"
        ):
            kept.running.with_earlier(layer, one_token, leaves[:5])
        kept.running.with_earlier(layer, leaves[:5], leaves[:5])[1].mul_(2)
    with kept.of(0, 1, 1, bounds, backward=False):
        assert kept.running is not None
        with pytest.raises(
            ScheduleError, match="changed the keys or values of earlier slices"
        ):
            kept.running.with_earlier(layer, leaves[5:6], leaves[5:6])


def test_slices_read_one_buffer() -> None:
    run_ranks(1, shared_storages)


WITH_TE = """
import sys
from tests.runtime import te_stand_in
te_stand_in.install()
import megatron_ext
from tests.features.slices.test_sliced_compute import MODELS, worst_difference
settings = MODELS[sys.argv[1]] | {"te": True}
# Rotary positions would copy queries, which else are parts of a projection.
settings |= {"apply_rope_fusion": True} if "packed" in settings else {"rotary": False}
print("worst", worst_difference(settings))
"""


def worst_by(program: str, name: str) -> float:
    """Run a program that prints the worst difference of a model, alone: it changes its process."""
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0"}
    run = subprocess.run(
        [sys.executable, "-c", program, name],
        env=env | {"WORLD_SIZE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return float(run.stdout.rpartition("worst ")[2])


@pytest.mark.short_s(4)
@pytest.mark.parametrize("name", ["tied", "latent", "packed"])
def test_wrapper_of_transformer_engine(name: str) -> None:
    """Megatron's own, over a stand-in for the library's attention."""
    assert worst_by(WITH_TE, name) < 2e-6


@pytest.mark.parametrize(
    ("patch", "model"),
    [
        ("attention", "tied"),
        ("rotary_positions", "tied"),
        ("cached_positions", "fused latent"),
        ("balance", "experts"),
        ("z_loss", "experts"),
        ("predicted_inputs", "later tokens"),
    ],
)
def test_each_patch_is_needed(patch: str, model: str) -> None:
    [worst] = run_ranks(1, worst_difference, MODELS[model], (f"slices.{patch}",))
    assert worst > 1e-3


@pytest.mark.parametrize(
    ("patch", "model"),
    [("predicted_tokens", "later tokens"), ("packed_batch", "packed")],
)
def test_without_its_patch_tensors_do_not_fit(patch: str, model: str) -> None:
    from megatron.core import utils

    if patch == "packed_batch" and not hasattr(
        utils, "flatten_batch_for_packed_sequences"
    ):
        pytest.skip("this Megatron does not join packed sequences")
    mismatch = "must match the size of tensor|out of bounds for dimension"
    with pytest.raises(RanksFailed, match=mismatch):
        run_ranks(1, worst_difference, MODELS[model], (f"slices.{patch}",))


def saved_bytes(num_slices: int) -> float:
    """Return what autograd keeps of a micro-batch's forwards, in tensors that are no weights."""
    import torch

    from megatron_ext.features.slices.slice_steps import kept_state
    from megatron_ext.schedules.table.slices import shares_of_equal_cost, token_bounds
    from tests.pipelines import use
    from tests.runtime import small_gpt

    length = small_gpt.SEQUENCE = 1024
    start_parallel()
    use(None)
    kept = kept_state()
    model = small_gpt.build(use_ddp=False, **PLAIN, recompute_granularity="selective")
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    bounds = token_bounds(shares_of_equal_cost(num_slices, 0.3), length)
    tokens = torch.arange(length)[None] % small_gpt.VOCABULARY
    outputs = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for number, (begin, end) in enumerate(pairwise(bounds)):
            with kept.of(0, 0, number, bounds, backward=False):
                part = tokens[:, begin:end]
                outputs.append(
                    model(part, torch.arange(begin, end)[None], None, labels=part)
                )
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def test_slices_keep_no_more_than_their_micro_batch() -> None:
    """Within 5 %, as tables count them, where attention is recomputed."""
    [whole], [sliced] = run_ranks(1, saved_bytes, 1), run_ranks(1, saved_bytes, 8)
    assert sliced == pytest.approx(whole, rel=0.05)


def own_model(num_slices: int, declares: bool = True) -> dict[str, Any]:
    """Return losses and gradients of a step of a model without a layer of Megatron's."""
    import torch

    import megatron_ext
    from megatron_ext.features.slices.sliced_compute import with_earlier_slices

    build = megatron_ext.configure(
        megatron_ext.PipelineConfig(schedule="zb-v", slices=num_slices, device="cpu"),
        pipeline_ranks=2,
        num_microbatches=4,
        num_layers=4,
    )

    from megatron.core import parallel_state, pipeline_parallel
    from megatron.core.enums import ModelType
    from megatron.core.transformer import TransformerConfig

    class Stage(torch.nn.Module):
        runs_in_slices = declares

        def __init__(self, config: Any, number: int) -> None:
            super().__init__()
            self.config, self.model_type = config, ModelType.encoder_or_decoder
            torch.manual_seed(number)
            self.embedding = torch.nn.Embedding(10, 8) if number == 0 else None
            self.layer = torch.nn.Linear(8, 24)
            self.received: Any = None
            self.firsts = 0.0

        def set_is_first_microbatch(self) -> None:
            self.firsts += 1

        def set_input_tensor(self, tensors: list[Any]) -> None:
            self.received = tensors[0]

        def forward(self, tokens: torch.Tensor | None) -> torch.Tensor:
            x = self.received if self.embedding is None else self.embedding(tokens.t())
            query, key, value = self.layer(x).chunk(3, dim=-1)
            key, value, begin = with_earlier_slices(self, key, value)
            is_later = torch.arange(len(key)) > (torch.arange(len(x)) + begin)[:, None]
            scores = torch.einsum("qbh,kbh->bqk", query, key).masked_fill(
                is_later, -torch.inf
            )
            return x + torch.einsum("bqk,kbh->qbh", scores.softmax(-1), value)

    def forward_step(data: Any, stage: Stage) -> tuple[torch.Tensor, Any]:
        output = stage(None if data is None else next(data)["tokens"])

        def loss(
            y: torch.Tensor,
        ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            total, count = y.square().sum(), torch.tensor(y.shape[0] * y.shape[1])
            return total, count, {"loss": torch.stack([total.detach(), count])}

        return output, loss

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(**build.groups)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_dtype=torch.float32,
        **build.transformer,
    )
    held = build.stages_of[parallel_state.get_pipeline_model_parallel_rank()]
    chunks = [Stage(config, number) for number in held]
    samples = torch.arange(4 * SEQUENCE).view(4, 1, SEQUENCE) * 7 % 10
    reports = pipeline_parallel.get_forward_backward_func()(
        forward_step_func=forward_step,
        model=chunks,
        num_microbatches=build.num_microbatches,
        data_iterator=[
            iter([{"tokens": sample} for sample in samples]) if number == 0 else None
            for number in held
        ],
        seq_length=SEQUENCE,
        micro_batch_size=1,
    )
    found = {
        f"{number}.{name}": parameter.grad
        for number, chunk in zip(held, chunks, strict=True)
        for name, parameter in chunk.named_parameters()
    }
    # Forwards that are the first of the step, where layers may convert their weights.
    found |= {
        f"firsts {n}": torch.tensor(chunk.firsts) for n, chunk in enumerate(chunks)
    }
    return found | {f"loss {n}": report["loss"] for n, report in enumerate(reports)}


def test_a_model_of_ones_own_reads_earlier_slices() -> None:
    for whole, sliced in zip(
        run_ranks(2, own_model, 1), run_ranks(2, own_model, 4), strict=True
    ):
        assert whole.keys() == sliced.keys()
        for name, expected in whole.items():
            worst = (sliced[name] - expected).abs().max() / expected.abs().max()
            assert worst < 1e-6, name


def test_a_model_that_does_not_say_how_it_keeps_state_is_refused() -> None:
    with pytest.raises(RanksFailed, match="a model that declares runs_in_slices"):
        run_ranks(2, own_model, 4, False)


def test_batches_are_cut_by_name() -> None:
    run_ranks(1, cut_batches)


def cut_batches() -> None:
    import torch

    from megatron_ext.errors import ScheduleError
    from megatron_ext.features.slices.sliced_compute import SlicedData
    from megatron_ext.runtime.compute import MicrobatchData

    def item(number: int) -> dict[str, Any]:
        tokens = torch.arange(SEQUENCE).expand(2, -1) + 100 * number
        mask = torch.ones(2, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
        given = {
            "tokens": tokens,
            "loss_mask": tokens * 1.0,
            "attention_mask": mask,
            "max": None,
        }
        return {**given, "dataset_id": torch.tensor([1, 2])}

    longer = {"tokens": torch.arange(26).view(1, -1)}
    empty_mask = torch.ones(1, 1, 0, 0, dtype=torch.bool)
    empty = {
        "tokens": torch.zeros(1, 0, dtype=torch.int64),
        "attention_mask": empty_mask,
    }
    given = [item(0), item(1), longer, empty]
    several = (BOUNDS, BOUNDS, (0, 26), (0, 0, 0))
    data = SlicedData(MicrobatchData(iter(given)), several, 3)
    for number in (0, 3, 1, 6, 4, 2, 9, 5, 10):  # slices of each micro-batch in order
        microbatch, part = divmod(number, 3)
        items = data.view(number)
        assert items is not None
        found = next(items)
        begin, end = [*pairwise(several[microbatch])][part]
        if microbatch == 2:
            assert found["tokens"].equal(given[2]["tokens"])
            continue
        if microbatch == 3:
            assert found["tokens"].tolist() == [[0]], "padding"
            assert found["attention_mask"].tolist() == [[[[False]]]]
            continue
        assert found["tokens"].equal(
            torch.arange(begin, end).expand(2, -1) + 100 * microbatch
        )
        assert found["loss_mask"].is_contiguous()
        assert found["attention_mask"].shape == (2, 1, end - begin, end)
        assert found["max"] is None
        assert found["dataset_id"].tolist() == [1, 2]
    assert SlicedData(MicrobatchData(None), [BOUNDS], 3).view(0) is None
    for wrong, reason in [
        (
            {"tokens": torch.zeros(2, 7)},
            r"tokens \[2, 7\] of a micro-batch with 24 tokens cannot be cut",
        ),
        (
            {"images": torch.zeros(2, SEQUENCE)},
            r"images .* set forward_step.fields_along_sequence = \('images',\)",
        ),
        (
            {"images": torch.zeros(2, 7)},
            r"images \[2, 7\] .* remove it from the data",
        ),
        ([1], "the data iterator yields a list"),
    ]:
        items = SlicedData(MicrobatchData(iter([wrong])), [BOUNDS], 3).view(0)
        assert items is not None
        with pytest.raises(ScheduleError, match=reason):
            next(items)
    whole: Any = [item(0)]
    with pytest.raises(ScheduleError, match="but the data is a list"):
        SlicedData(MicrobatchData(whole), [BOUNDS], 3).view(0)
    advantages = torch.arange(2.0 * SEQUENCE).view(2, -1)
    with_advantages = MicrobatchData(iter([{**item(0), "advantages": advantages}]))
    data = SlicedData(with_advantages, [BOUNDS], 3, declared=["advantages"])
    parts = [data.take(number)["advantages"] for number in range(3)]
    assert torch.cat(parts, 1).equal(advantages)
    # A forward step that shifts tokens would lose the target of the last token of each slice.
    cut_bounds = (BOUNDS, (0, SEQUENCE))
    unlabelled = MicrobatchData(iter([item(0), item(1)]))
    data = SlicedData(unlabelled, cut_bounds, 3, required=["labels"])
    with pytest.raises(
        ScheduleError, match=r"the data has no labels, and .* add labels"
    ):
        data.take(0)
    assert data.take(3)["tokens"].shape == (2, SEQUENCE), "a whole one needs none"


def test_a_forward_step_declares_its_fields_through_wrappers() -> None:
    from megatron_ext.features.slices.sliceable import declared_fields

    def forward_step(data: object, model: object) -> None:
        """Do nothing."""

    @functools.wraps(forward_step)
    def wrapped(data: object, model: object) -> None:
        forward_step(data, model)

    assert declared_fields(forward_step) == ()
    forward_step.fields_along_sequence = ("advantages",)
    assert declared_fields(forward_step) == ("advantages",)
    assert declared_fields(functools.partial(wrapped, model=None)) == ("advantages",)


def fields_by_model() -> list[tuple[str, ...]]:
    from megatron_ext.features.slices.sliceable import fields_beyond_tokens
    from tests.runtime import small_gpt

    start_parallel()
    model = small_gpt.build(use_ddp=False, **PLAIN)
    fields = []
    for position_embedding_type in ("learned_absolute", "rope"):
        model.position_embedding_type = position_embedding_type
        fields.append(fields_beyond_tokens(model))
    model.post_process = False
    fields.append(fields_beyond_tokens(model))
    model.position_embedding_type = "learned_absolute"
    model.runs_in_slices = True
    fields.append(fields_beyond_tokens(model))
    return fields


def test_positions_and_labels_must_come_from_the_data() -> None:
    [fields] = run_ranks(1, fields_by_model)
    assert fields == [("position_ids", "labels"), ("labels",), (), ()]


def test_a_slice_counts_its_share_of_activations() -> None:
    from megatron_ext.runtime.program import make_table
    from megatron_ext.runtime.runtime import Measured
    from megatron_ext.schedules import Costs
    from tests.pipelines import make_pipeline

    pipeline = make_pipeline("1f1b", 2, 4, slices=4, costs=Costs(attention=0.5))
    table = make_table(pipeline, 4, 0, backward=True)
    measured = Measured()
    measured.begin_step(cast("Any", SimpleNamespace(table=table)))
    row = table.schedule.rows[0]
    measured.end_step([(i, action, 0.1) for i, action in enumerate(row)], 1.0)
    assert measured.peak_live == pytest.approx(measure(table.schedule).activations[0])
    assert 1 < measured.peak_live < 1.5


def train_bert(flags: str) -> None:
    run_here("bert", flags.split())


def test_other_models_are_refused(tmp_path: Path) -> None:
    flags = f"{bert_flags(tmp_path)}{PP2}{SLICES}--pipeline-schedule 1f1b "
    require_training("pretrain_bert.py")
    with pytest.raises(RanksFailed, match="slices need a GPTModel with Megatron's or"):
        run_ranks(2, train_bert, flags)


def wrong_layers() -> list[str]:
    import torch
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_ext.errors import ScheduleError
    from megatron_ext.features.slices.slice_steps import kept_state
    from megatron_ext.features.slices.sliceable import check_model
    from tests.pipelines import use
    from tests.runtime import small_gpt

    start_parallel()
    model = small_gpt.build(use_ddp=False, **PLAIN)
    core = model.decoder.layers[1].self_attention.core_attention
    softmax, found = core.scale_mask_softmax, []
    softmax.input_in_float16 = True
    check_model(model)
    for changed, name, value in (
        (softmax, "scaled_masked_softmax_fusion", True),
        (core, "attn_mask_type", AttnMaskType.no_mask),
    ):
        setattr(changed, name, value)
        with pytest.raises(ScheduleError) as raised:
            check_model(model)
        found.append(str(raised.value))
    use(None)
    tokens = torch.arange(11)[None]
    running = kept_state().of(0, 0, 0, BOUNDS, backward=False)
    with running, pytest.raises(ScheduleError) as raised:
        model(tokens, tokens, None, labels=tokens, padding_mask=tokens > 7)
    return [*found, str(raised.value)]


def test_attention_to_later_tokens_a_fused_softmax_and_padding_are_refused() -> None:
    [(fused, later, padded)] = run_ranks(1, wrong_layers)
    assert "GPTModel.forward's padding_mask cannot be used in slices" in padded
    assert (
        "not the fused softmax in 16 bits, which requires as many queries as keys"
        in fused
    )
    assert "not attention to later tokens; disable slices" in later


def strange_models() -> list[str]:
    """Return the refusals of a GPT with hooks and modules of others; it runs between them."""
    import torch

    from megatron_ext.errors import ScheduleError
    from megatron_ext.features.slices.sliceable import check_model
    from tests.runtime import small_gpt

    class Mean(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x.mean(0, keepdim=True)

    class Tokenwise(Mean):
        runs_in_slices = True

    def hook(*_: Any) -> None:
        """Change nothing."""

    def declared(*_: Any) -> None:
        """Change nothing, and say so."""

    declared.runs_in_slices = True  # type: ignore[attr-defined]
    start_parallel()
    model = small_gpt.build(use_ddp=False, **PLAIN)
    layer = model.decoder.layers[1]
    weight = layer.mlp.linear_fc1.weight
    told = []
    for register in (
        layer.register_forward_hook,
        layer.mlp.register_forward_pre_hook,
        model.decoder.register_full_backward_hook,
        weight.register_hook,
        weight.register_post_accumulate_grad_hook,
        torch.nn.modules.module.register_module_forward_hook,
        torch.nn.modules.module.register_module_full_backward_pre_hook,
    ):
        declared_handle = register(declared)
        check_model(model)
        declared_handle.remove()
        handle = register(hook)
        with pytest.raises(ScheduleError) as raised:
            check_model(model)
        told.append(str(raised.value))
        handle.remove()
    layer.extra = Tokenwise()
    check_model(model)
    for module in (Mean(), torch.nn.BatchNorm1d(3), torch.nn.Conv1d(3, 3, 3)):
        layer.extra = module
        with pytest.raises(ScheduleError) as raised:
            check_model(model)
        told.append(str(raised.value))
    layer.extra = torch.nn.Sequential(
        torch.nn.Linear(3, 3), torch.nn.GELU(), torch.nn.LayerNorm(3)
    )
    check_model(model)
    return told


def wrapped_calls() -> list[str]:
    """Return the refusals of a GPT whose modules a program wraps."""
    import torch

    from megatron_ext.errors import ScheduleError
    from megatron_ext.features.slices.sliceable import check_model
    from tests.runtime import small_gpt

    start_parallel()
    model = small_gpt.build(**PLAIN)
    layer = model.module.decoder.layers[1]
    calls = (
        (layer, "forward"),
        (type(layer), "forward"),
        (type(layer.mlp), "__call__"),
        (torch.nn.Module, "__call__"),
    )
    told = []

    def check() -> None:
        with pytest.raises(ScheduleError) as raised:
            check_model(model)
        told.append(str(raised.value))

    for owner, name in calls:
        original = getattr(owner, name)
        is_inherited = name not in vars(owner)

        @functools.wraps(original)
        def wrapped(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

        check_model(model)
        setattr(owner, name, wrapped)
        check()
        wrapped.runs_in_slices = True  # type: ignore[attr-defined]
        check_model(model)
        if is_inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
    hook = functools.wraps(type(layer).forward)(lambda *_: None)
    layer.register_forward_hook(hook)
    check()
    layer._forward_hooks.clear()
    model.register_forward_hook(lambda *_: None)
    check()
    return told


def test_functions_around_modules_are_refused_unless_they_declare_slices() -> None:
    """`functools.wraps` makes them look like Megatron's; a program holds Megatron's DDP."""
    [refusals] = run_ranks(1, wrapped_calls)
    beginnings = (
        "a function around decoder.layers.1 (TransformerLayer) ",
        "a function around decoder.layers.0 (TransformerLayer) ",
        "a function around decoder.layers.0.mlp (MLP) ",
        "a function around DistributedDataParallel ",
        "a hook on decoder.layers.1 (TransformerLayer) ",
        "a hook on DistributedDataParallel ",
    )
    for refusal, beginning in zip(refusals, beginnings, strict=True):
        assert refusal.startswith(beginning)


def test_hooks_and_modules_that_may_connect_tokens_are_refused_unless_they_declare_slices() -> (
    None
):
    [told] = run_ranks(1, strange_models)
    hooks, modules = told[:7], told[7:]
    for refusal in hooks:
        assert "hook on " in refusal
        assert (
            "set runs_in_slices = True on the hook (strange_models.<locals>.hook)"
            in refusal
        )
    for refusal, kind in zip(modules, ("Mean", "BatchNorm1d", "Conv1d"), strict=True):
        assert refusal.startswith(
            f"decoder.layers.1.extra ({kind}) runs once per slice"
        )
