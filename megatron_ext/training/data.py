"""Tokenizers, datasets and data loaders: the same samples in the same order as upstream's script.

Follows the dataset providers of `pretrain_gpt.py` and `pretrain_bert.py`, and
`megatron/training/datasets/data_samplers.py`. Checks datasets before use, so that errors name a
damaged one.
"""

from __future__ import annotations

import math
import struct
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.datasets.bert_dataset import (
    BERTMaskedWordPieceDataset,
    BERTMaskedWordPieceDatasetConfig,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import _IndexReader
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.tokenizers import MegatronTokenizer

from megatron_ext.errors import DataError
from megatron_ext.preprocess.local_vocabulary import check_local
from megatron_ext.preprocess.tokenizer import build_named
from megatron_ext.training.index_cache import IndexedBuilder
from megatron_ext.upstream.signatures import mtp_on_this_rank

if TYPE_CHECKING:
    from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
    from megatron.core.transformer import TransformerConfig

    from megatron_ext.training.trainer_arguments import Model

__all__ = [
    "Iterators",
    "build_iterators",
    "build_tokenizer",
    "check_indexed_dataset",
    "dataset_config",
    "fields_read",
]

_CHECKED_AT_ONCE = 1 << 20
"""Number of index entries to compare in memory."""

DataIterator: TypeAlias = "Iterator[Any] | list[Iterator[Any] | None] | None"


class Iterators(NamedTuple):
    """The data of one rank: None if it reads nothing; a list with one entry for each chunk."""

    train: DataIterator
    valid: DataIterator
    test: DataIterator


# The flags with the files that tokenizers need.
_TOKENIZER_FILES: dict[str, tuple[str, ...]] = {
    "BertWordPieceLowerCase": ("vocab_file",),
    "BertWordPieceCase": ("vocab_file",),
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "NullTokenizer": (),
    "ByteLevelTokenizer": (),
}


def build_tokenizer(args: Namespace) -> Any:
    """Build the tokenizer that the flags name and set `args.padded_vocab_size`.

    Types are upstream's, plus ByteLevelTokenizer: every byte is a token, no file is needed.

    Raises:
        DataError: A file that the tokenizer needs was not given or does not exist.
    """
    kind = args.tokenizer_type
    check_local(args)
    for flag in _TOKENIZER_FILES.get(kind, ("tokenizer_model",)):
        path = getattr(args, flag)
        name = f"--{flag.replace('_', '-')}"
        if path is None:
            raise DataError(f"--tokenizer-type {kind} needs {name}: give its path")
        if kind != "HuggingFaceTokenizer" and not Path(path).is_file():
            raise DataError(f"{name} {path}: there is no such file; correct the path")
    if kind == "NullTokenizer" and args.vocab_size is None:
        raise DataError("--tokenizer-type NullTokenizer needs --vocab-size: give the largest id")
    try:
        if kind == "ByteLevelTokenizer":
            tokenizer = MegatronTokenizer.from_pretrained(metadata_path={"library": "byte-level"})
        else:
            tokenizer = build_named(args)
    except (AssertionError, OSError, ValueError, ImportError) as error:
        raise DataError(f"the {kind} cannot be built: {error}") from error
    if args.padded_vocab_size is None:
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        args.padded_vocab_size = math.ceil(tokenizer.vocab_size / multiple) * multiple
    return tokenizer


def check_indexed_dataset(prefix: str) -> tuple[int, int]:
    """Check that `prefix.bin` and `prefix.idx` are a whole Megatron dataset.

    Returns:
        The number of sequences and the number of documents.

    Raises:
        DataError: A file is missing, damaged, or of another kind or version.
    """
    remake = "write it again with `megatron-ext preprocess`"
    for path in (Path(f"{prefix}.idx"), Path(f"{prefix}.bin")):
        if not path.is_file():
            raise DataError(
                f"{path}: there is no such file; {prefix} must be the common prefix of an .idx and "
                "a .bin file, for example as `megatron-ext preprocess` wrote them"
            )
    try:
        # Not IndexedDataset: if its constructor fails, its destructor complains.
        index = _IndexReader(f"{prefix}.idx", multimodal=False)
    except (ArithmeticError, AssertionError, LookupError, ValueError, struct.error) as error:
        reason = str(error) or "its counts contradict each other"
        raise DataError(f"{prefix}.idx: a damaged index ({reason}); {remake}") from error
    if not len(index):
        raise DataError(f"{prefix}.idx: no documents in it; {remake}")
    wrong = _first_contradiction(index)
    if wrong is not None:
        raise DataError(f"{prefix}.idx: a damaged index ({wrong}); {remake}")
    end = int(index.sequence_pointers[-1] + index.sequence_lengths[-1] * index.dtype_size)
    size = path.stat().st_size
    if size != end:
        raise DataError(f"{path}: {size} bytes, its index tells {end}; {remake}")
    return len(index), len(index.document_indices) - 1


def _first_contradiction(index: Any) -> str | None:
    """Return the first entry of an index that contradicts its predecessor, in words."""
    lengths, pointers = index.sequence_lengths, index.sequence_pointers
    if pointers[0] != 0:
        return "sequence 0 is not at the beginning"
    for first in range(0, len(lengths), _CHECKED_AT_ONCE):
        part = slice(first, first + _CHECKED_AT_ONCE + 1)
        ends = pointers[part] + lengths[part].astype(np.int64) * index.dtype_size
        wrong = (ends[:-1] != pointers[part][1:]) | (lengths[part][:-1] < 0)
        if wrong.any():
            return f"sequence {first + int(wrong.argmax()) + 1} does not follow the one before"
    if lengths[-1] < 0:
        return f"sequence {len(lengths) - 1} has {lengths[-1]} tokens"
    documents = index.document_indices
    steps = np.diff(documents)
    if (steps < 0).any():
        return f"document {int((steps < 0).argmax()) + 1} begins before the one before"
    if documents[0] != 0 or documents[-1] != len(lengths):
        return "its documents are not all of its sequences"
    return None


def dataset_config(args: Namespace, model: Model, tokenizer: Any) -> BlendedMegatronDatasetConfig:
    """Check the files of the datasets, and make their configuration.

    Raises:
        DataError: A dataset is missing or damaged, or the flags about data contradict each other.
    """
    try:
        config = (_gpt_config if model == "gpt" else _bert_config)(args, tokenizer)
    except (AssertionError, ValueError) as error:
        reason = str(error) or f"--split {args.split} is not a list of at most three numbers"
        raise DataError(f"megatron.core refuses the data flags: {reason}") from error
    for prefix in config.blend[0] if config.blend else ():
        count = check_indexed_dataset(prefix)[model == "bert"]  # BERT splits by documents
        for bounds in config.split_matrix:
            if bounds and round(bounds[0] * count) >= round(bounds[1] * count):
                raise DataError(
                    f"{prefix}: {count} documents are too few for --split {args.split}, which "
                    "would leave a part empty; give more text, or 0 for that part"
                )
    return config


def build_iterators(
    args: Namespace, model: Model, config: TransformerConfig, datasets: BlendedMegatronDatasetConfig
) -> Iterators:
    """Build datasets, loaders and iterators; sets `args.do_train`, `do_valid` and `do_test`.

    Collective: rank 0 builds dataset indices first.

    Raises:
        DataError: A dataset is exhausted, or its indices cannot be stored.
    """
    stages: Sequence[int | None] = range(args.virtual_pipeline_model_parallel_size or 0) or [None]
    chunks = [_chunk_iterators(args, model, config, datasets, stage) for stage in stages]
    wanted = (args.train_iters, args.eval_iters, args.eval_iters)
    args.do_train, args.do_valid, args.do_test = (
        bool(part and rounds) for part, rounds in zip(datasets.split_matrix, wanted, strict=True)
    )
    if stages == [None]:
        return Iterators(*chunks[0])
    return Iterators(*(list(split) for split in zip(*chunks, strict=True)))


def sample_counts(args: Namespace) -> tuple[int, int, int]:
    """Return the numbers of training, validation and test samples of a run."""
    evaluations = args.train_iters // args.eval_interval if args.eval_interval else 0
    train = args.train_samples or args.train_iters * args.global_batch_size
    evaluation = args.eval_iters * args.global_batch_size
    return train, (evaluations + 1) * evaluation, evaluation


def _chunk_iterators(
    args: Namespace,
    model: Model,
    config: TransformerConfig,
    dataset_config: BlendedMegatronDatasetConfig,
    stage: int | None,
) -> list[Iterator[Any] | None]:
    def built_here() -> bool:
        first_of_tp = parallel_state.get_tensor_model_parallel_rank() == 0
        return first_of_tp and (model == "bert" or bool(fields_read(args, config, stage)))

    dataset: Any = BERTMaskedWordPieceDataset if model == "bert" else GPTDataset
    if args.mock_data:
        dataset = MockGPTDataset
    datasets = IndexedBuilder(dataset, sample_counts(args), built_here, dataset_config).build()
    # A run that is over reads no training data: it may have used up all there is.
    trained = 0 if args.iteration >= args.train_iters else args.consumed_train_samples
    consumed = (trained, args.consumed_valid_samples, 0)
    loaders = [_loader(args, one, start) for one, start in zip(datasets, consumed, strict=True)]
    # Making an iterator draws from the default generator: only now, and in this order.
    return [None if one is None else iter(one) for one in loaders]


def fields_read(args: Namespace, config: TransformerConfig, vp_stage: int | None) -> list[str]:
    """Return the fields that a stage of GPT reads; only the first, the last and MTP stages do."""
    where = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    predicts = mtp_on_this_rank(config, vp_stage=vp_stage)
    fields = []
    if parallel_state.is_pipeline_first_stage(**where) or predicts:
        fields += ["tokens", "position_ids"]
    if parallel_state.is_pipeline_last_stage(**where) or predicts:
        fields += ["labels", "loss_mask"]
    if fields and args.create_attention_mask_in_dataloader:
        fields.append("attention_mask")
    return fields


def _loader(args: Namespace, dataset: Any, consumed: int) -> Any:
    if dataset is None or len(dataset) == 0:
        return None
    if consumed >= len(dataset):
        raise DataError(
            f"{consumed} samples were consumed of a dataset of {len(dataset)}: train for more "
            "iterations than the checkpoint has, or give --finetune to restart the data"
        )
    return torch.utils.data.DataLoader(
        dataset,
        batch_sampler=_Sampler(
            len(dataset),
            consumed,
            args.micro_batch_size,
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_data_parallel_world_size(),
        ),
        num_workers=args.num_workers,
        pin_memory=True,
        persistent_workers=args.num_workers > 0,
    )


@dataclass(frozen=True)
class _Sampler:
    """Deals consecutive samples to replicas, a micro-batch each; drops an incomplete round."""

    total: int
    consumed: int
    micro_batch_size: int
    replica: int
    replicas: int

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[list[int]]:
        step = self.micro_batch_size * self.replicas
        for start in range(self.consumed, self.total - step + 1, step):
            first = start + self.replica * self.micro_batch_size
            yield list(range(first, first + self.micro_batch_size))


def _common_config(args: Namespace, tokenizer: Any) -> dict[str, Any]:
    return {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": get_blend_from_list(args.data_path),
        "split": args.split,
        "path_to_cache": args.data_cache_path,
        "tokenizer": tokenizer,
    }


def _gpt_config(args: Namespace, tokenizer: Any) -> GPTDatasetConfig:
    return GPTDatasetConfig(
        **_common_config(args, tokenizer),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )


def _bert_config(args: Namespace, tokenizer: Any) -> BERTMaskedWordPieceDatasetConfig:
    if args.mock_data:
        raise DataError("--mock-data: BERT has no artificial data; give --data-path")
    return BERTMaskedWordPieceDatasetConfig(
        **_common_config(args, tokenizer),
        masking_probability=0.15,
        short_sequence_probability=0.1,
        masking_max_ngram=3,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
        classification_head=True,
    )
