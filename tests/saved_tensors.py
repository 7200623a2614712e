"""Reads the tensors of a checkpoint that Megatron has saved, without its ranks."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of the latest checkpoint in a folder, by name, on the CPU."""
    latest = max(folder.glob("iter_*"))
    reader = checkpoint.FileSystemReader(latest)
    tensors = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    checkpoint.load(dict(tensors), storage_reader=reader, no_dist=True)
    return tensors
