"""Five models whose stages exchange more than a single tensor [s, b, h]."""

import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.T5 import t5_spec
from stages import LENGTH, MASK, Stage, linear, project, transformer_layer

from megatron_ext import routes


class HyperConnections(Stage):
    """A GPT with four residual streams, which each layer mixes (hyper-connections)."""

    STREAMS = 4

    def __init__(self, config, number, num_stages):
        super().__init__(config, number, num_stages)
        routes.declare(self, boundary="fixed")

    def build(self):
        layers = super().build()
        for number in self.numbers:
            mix = torch.nn.Linear(self.STREAMS, self.STREAMS + 1, bias=False)
            layers[f"mix{number}"] = self.shared(mix)
        return layers

    def forward(self, sample):
        streams = (
            [self.tokens(sample)] * self.STREAMS if self.is_first else self.received
        )
        for number in self.numbers:
            read, *write = self.layers[f"mix{number}"].weight
            made, _ = self.layers[str(number)](
                mixed(read, streams), attention_mask=MASK
            )
            streams = [mixed(weights, streams) + made for weights in write]
        return self.loss(sum(streams), sample) if self.is_last else streams


def mixed(weights, streams):
    """Return a weighted sum."""
    return sum(weight * stream for weight, stream in zip(weights, streams, strict=True))


class AttentionOverBlocks(Stage):
    """A GPT whose blocks take a weighted sum of the outputs of all earlier blocks."""

    def __init__(self, config, number, num_stages):
        super().__init__(config, number, num_stages)
        own = {f"block{i}" for i in self.numbers}
        before = [f"block{i}" for i in range(-1, max(self.numbers, default=-1))]
        first = ["block-1"] if self.is_first else []
        last = f"block{config.num_layers - 1}"
        routes.declare(
            self,
            publishes=sorted({*first, *own} - {last}),
            takes=before,
            boundary="fixed",
        )

    def build(self):
        layers = super().build()
        for number in self.numbers:
            query = torch.nn.Linear(self.config.hidden_size, 1, bias=False)
            layers[f"query{number}"] = self.shared(query)
        return layers

    def forward(self, sample):
        hidden = None
        if self.is_first:
            routes.publish("block-1", self.tokens(sample))
        for number in self.numbers:
            before = torch.stack([routes.take(f"block{i}") for i in range(-1, number)])
            shares = self.layers[f"query{number}"](before).softmax(0)
            hidden, _ = self.layers[str(number)](
                (shares * before).sum(0), attention_mask=MASK
            )
            if number < self.config.num_layers - 1:
                hidden = routes.publish(f"block{number}", hidden)
        # The next stage gets its inputs only from routes.
        return self.loss(hidden, sample) if self.is_last else None


class VisionLanguage(Stage):
    """A language model that adds the features of an image tower to the inputs of its first layers.

    The layers that take features belong to several stages. Half of the samples have no image.
    """

    LEVELS = 3

    def __init__(self, config, number, num_stages):
        super().__init__(config, number, num_stages)
        routes.declare(
            self,
            publishes=[f"features{i}" for i in range(self.LEVELS)]
            if self.is_first
            else [],
            takes=[f"features{i}" for i in self._injected],
            boundary="varies",
        )

    @property
    def _injected(self):
        """The layers of this stage that take image features."""
        every = max(1, self.config.num_layers // 4)
        return [
            i // every
            for i in self.numbers
            if i % every == 0 and i // every < self.LEVELS
        ]

    def build(self):
        layers = super().build()
        if self.is_first:
            for level in range(self.LEVELS):
                layers[f"tower{level}"] = linear(
                    self.config, *[self.config.hidden_size] * 2
                )
        return layers

    def forward(self, sample):
        hidden = self.tokens(sample) if self.is_first else self.received
        if self.is_first:
            image = self.part(sample["image"]) if sample["text"][0, 0] % 2 else None
            for level in range(self.LEVELS):
                if image is not None:
                    image = self.part(
                        torch.tanh(project(self.layers[f"tower{level}"], image))
                    )
                routes.publish(f"features{level}", image)
        every = max(1, self.config.num_layers // 4)
        for number in self.numbers:
            level = number // every
            if number % every == 0 and level < self.LEVELS:
                features = routes.take(f"features{level}")
                hidden = hidden if features is None else hidden + features
            hidden, _ = self.layers[str(number)](hidden, attention_mask=MASK)
        return self.loss(hidden, sample) if self.is_last else hidden


class EncoderDecoder(Stage):
    """An encoder and a decoder with cross-attention, built from megatron.core's layers.

    The first half of the layers encodes. Each stage of the decoder takes the encoder's output.
    """

    def __init__(self, config, number, num_stages):
        self.half = config.num_layers // 2
        super().__init__(config, number, num_stages)
        decodes = any(i >= self.half for i in self.numbers)
        routes.declare(
            self,
            publishes=["encoded"] if self.half - 1 in self.numbers else [],
            takes=["encoded"] if decodes else [],
            boundary="fixed",
        )

    def build(self):
        encoder = gpt_layer_specs.get_gpt_layer_local_spec()
        [decoder, *_] = t5_spec.get_t5_decoder_with_local_block_spec(1).layer_specs
        layers = {
            str(i): transformer_layer(
                self.config, i, encoder if i < self.half else decoder
            )
            for i in self.numbers
        }
        if self.half in self.numbers:
            layers["target"] = torch.nn.Embedding(32, self.config.hidden_size)
        return layers

    def forward(self, sample):
        hidden = self.tokens(sample, "source") if self.is_first else self.received
        everything = torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.bool)
        for number in self.numbers:
            if number < self.half:
                hidden, _ = self.layers[str(number)](hidden, attention_mask=everything)
                if number == self.half - 1:
                    routes.publish("encoded", hidden)
                    hidden = None
                continue
            if number == self.half:
                hidden = self.part(self.layers["target"](sample["text"][:-1]))
            hidden, _ = self.layers[str(number)](
                hidden,
                attention_mask=MASK,
                context=routes.take("encoded"),
                context_mask=everything,
            )
        return self.loss(hidden, sample) if self.is_last else hidden


class LossAlone(Stage):
    """A GPT whose last stage only computes the loss from received logits and labels."""

    def __init__(self, config, number, num_stages):
        super().__init__(config, number, num_stages)
        routes.declare(self, boundary="fixed")

    @staticmethod
    def layers_of(number, num_stages, num_layers):
        parts = max(1, num_stages - 1)
        return range(
            min(number, parts) * num_layers // parts,
            min(number + 1, parts) * num_layers // parts,
        )

    @staticmethod
    def has_head(number, num_stages):
        return number == max(0, num_stages - 2)

    def forward(self, sample):
        made = self.received
        if self.numbers:
            hidden = self.tokens(sample) if self.is_first else made
            for number in self.numbers:
                hidden, _ = self.layers[str(number)](hidden, attention_mask=MASK)
            made = hidden
        if hasattr(self, "head"):
            made = {"logits": project(self.head, made), "labels": sample["text"][1:]}
        return self.loss_of(made["logits"], made["labels"]) if self.is_last else made


MODELS = {
    "hyper-connections": HyperConnections,
    "attention-over-blocks": AttentionOverBlocks,
    "vision-language": VisionLanguage,
    "encoder-decoder": EncoderDecoder,
    "loss-alone": LossAlone,
}
