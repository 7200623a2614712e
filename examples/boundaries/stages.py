"""Common to the models here: a cut into stages, layers of megatron.core, fixed weights.

A stage is a plain module. Megatron gives it the output of the stage before by `set_input_tensor`,
and sends what its `forward` returns. Weights follow from their names, so that a model is the
same however it is cut.
"""

import zlib

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import build_module

WIDTH, LENGTH, BATCH, VOCABULARY = 16, 8, 2, 32
MASK = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)


class Stage(torch.nn.Module):
    """One stage of a model: its first part has the embedding, its last one the loss.

    Args:
        config: Megatron's, with `num_layers`.
        number: Of the stage.
        num_stages: Of the model.
    """

    def __init__(self, config, number, num_stages):
        super().__init__()
        self.config, self.number = config, number
        self.is_first, self.is_last = number == 0, number == num_stages - 1
        # What Megatron's steps ask a model for.
        self.model_type, self.share_embeddings_and_output_weights = None, False
        self.pre_process, self.post_process = self.is_first, self.is_last
        self.received = None
        self.numbers = self.layers_of(number, num_stages, config.num_layers)
        self.layers = torch.nn.ModuleDict(self.build())
        if self.is_first:
            self.embedding = torch.nn.Embedding(VOCABULARY, config.hidden_size)
        if self.has_head(number, num_stages):
            self.head = linear(config, config.hidden_size, VOCABULARY)
        fill(self)

    @staticmethod
    def layers_of(number, num_stages, num_layers):
        """Return the numbers of a stage's layers."""
        return range(
            number * num_layers // num_stages, (number + 1) * num_layers // num_stages
        )

    @staticmethod
    def has_head(number, num_stages):
        """Tell whether a stage makes the logits."""
        return number == num_stages - 1

    def build(self):
        """Return the layers of this stage, by name."""
        return {
            str(number): transformer_layer(self.config, number)
            for number in self.numbers
        }

    def set_input_tensor(self, tensors):
        """Take the output of the stage before; Megatron calls it."""
        self.received = tensors[0]

    def tokens(self, sample, kind="text"):
        """Return a micro-batch's tokens, embedded: [s, b, h]."""
        return self.part(self.embedding(sample[kind][:-1]))

    def part(self, whole):
        """Return this rank's part of [s, b, h] if sequence parallelism splits it, else all."""
        if self.config.sequence_parallel:
            return scatter_to_sequence_parallel_region(whole)
        return whole

    def shared(self, module):
        """Mark weights that each rank runs on its part of a sequence: Megatron sums gradients."""
        for weight in module.parameters():
            weight.sequence_parallel = self.config.sequence_parallel
        return module

    def loss(self, hidden, sample):
        """Return the loss of a micro-batch, a scalar."""
        return self.loss_of(project(self.head, hidden), sample["text"][1:])

    @staticmethod
    def loss_of(logits, labels):
        """Return the mean cross-entropy of logits [s, b, v] for labels [s, b]."""
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def transformer_layer(config, number, spec=None):
    """Build one of megatron.core's transformer layers; the stage knows where in the model it is."""
    spec = spec or gpt_layer_specs.get_gpt_layer_local_spec()
    alone = TransformerConfig(
        num_layers=config.num_layers, hidden_size=config.hidden_size, hidden_dropout=0.0,
        num_attention_heads=config.num_attention_heads, attention_dropout=0.0,
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        sequence_parallel=config.sequence_parallel,
    )  # fmt: skip
    return build_module(spec, config=alone, layer_number=number + 1)


def linear(config, rows, columns):
    """Build a linear layer whose weight gradient zero-bubble schedules postpone."""
    return ColumnParallelLinear(
        rows, columns, config=config, init_method=torch.nn.init.zeros_, bias=False
    )


def project(layer, hidden):
    """Run a `linear` on [s, b, h] or this rank's part of it; return all its columns, whole."""
    return gather_from_tensor_model_parallel_region(layer(hidden)[0])


def fill(module):
    """Give each weight values that follow from its name; a tensor-parallel rank gets its part."""
    parts = parallel_state.get_tensor_model_parallel_world_size()
    part = parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.dim() > 1:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                split = getattr(weight, "partition_dim", -1)
                shape = [
                    n * parts if i == split else n for i, n in enumerate(weight.shape)
                ]
                whole = torch.randn(shape, generator=generator) * 0.2
                weight.copy_(whole if split < 0 else whole.chunk(parts, split)[part])


def sample(number):
    """Return the data of one micro-batch."""
    generator = torch.Generator().manual_seed(number)
    shape = LENGTH + 1, BATCH
    return {
        "text": torch.randint(VOCABULARY, shape, generator=generator),
        "source": torch.randint(VOCABULARY, shape, generator=generator),
        "image": torch.randn(LENGTH, BATCH, WIDTH, generator=generator),
    }
