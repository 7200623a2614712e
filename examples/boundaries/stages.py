"""Code shared by the models in this folder: stages, layers of megatron.core, fixed weights.

A stage is a plain module. Megatron passes the output of the previous stage to `set_input_tensor`
and sends the result of `forward`. Weights are derived from their names, so they do not depend on
how the model is split.
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
    """One stage of a model. The first stage has the embedding, and the last has the loss.

    Args:
        config: Megatron's `TransformerConfig`, with `num_layers`.
        number: The number of the stage.
        num_stages: The number of stages of the model.
    """

    def __init__(self, config, number, num_stages):
        super().__init__()
        self.config, self.number = config, number
        self.is_first, self.is_last = number == 0, number == num_stages - 1
        # Megatron's forward and backward steps read these attributes.
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
        """Return whether a stage computes the logits."""
        return number == num_stages - 1

    def build(self):
        """Return the layers of this stage, by name."""
        return {
            str(number): transformer_layer(self.config, number)
            for number in self.numbers
        }

    def set_input_tensor(self, tensors):
        """Set the output of the previous stage. Megatron calls this method."""
        self.received = tensors[0]

    def tokens(self, sample, kind="text"):
        """Return the embedded tokens of a micro-batch: [s, b, h]."""
        return self.part(self.embedding(sample[kind][:-1]))

    def part(self, whole):
        """Return this rank's part of [s, b, h] under sequence parallelism, otherwise all of it."""
        if self.config.sequence_parallel:
            return scatter_to_sequence_parallel_region(whole)
        return whole

    def shared(self, module):
        """Mark weights that run on a part of the sequence: Megatron sums their gradients."""
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
    """Build one of megatron.core's transformer layers at its position in the model."""
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
    """Run a `linear` layer on [s, b, h] or this rank's part of it. Return all output columns."""
    return gather_from_tensor_model_parallel_region(layer(hidden)[0])


def fill(module):
    """Initialize each weight from its name. A tensor-parallel rank gets its part of the weight."""
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
