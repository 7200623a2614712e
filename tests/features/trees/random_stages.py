"""Random stages: a seed determines what they take, compute, publish and output.

Run in sequence, they form a model without a pipeline, whose gradients are the reference.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from megatron_ext import routes

WIDTH = 4
NUM_WEIGHTS = 3


class RandomStage(torch.nn.Module):
    """One stage of the model of a seed.

    Args:
        config: Megatron's.
        seed: xber: Of the stage.
        num_stages: Of the model.
    Whether micro-batches differ in lengths, trees and what is None (`varies`), and whether layers
    are computed again in the backward (`recomputes`), follows from the seed too.
    """

    def __init__(
        self,
        config: Any,
        seed: int,
        number: int,
        num_stages: int,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.config, self.model_type, self.vp_stage = config, None, None
        self.seed, self.number, self.num_stages = seed, number, num_stages
        self.varies, self.recomputes = bool(seed % 2), seed % 3 == 0
        generator = torch.Generator().manual_seed(100 * seed + number)
        self.weights = torch.nn.ParameterList(
            (torch.randn(WIDTH, WIDTH, generator=generator) / 2).to(device)
            for _ in range(NUM_WEIGHTS)
        )
        self.received: Any = None
        self.publishes, self.takes = names_of(seed, number, num_stages)
        boundary: routes.Boundary = "varies" if self.varies else "fixed"
        routes.declare(
            self, publishes=self.publishes, takes=self.takes, boundary=boundary
        )

    def set_input_tensor(self, tensors: list[Any]) -> None:
        self.received = tensors[0]

    def forward(self, microbatch: int) -> Any:
        draw = self._draw(microbatch, "boundary")
        pool = list(floats(self.received))
        if self.number == 0 or not pool:
            length = 2 + (microbatch % 3 if self.varies else 0)
            generator = torch.Generator().manual_seed(microbatch)
            data = torch.randn(length, WIDTH, generator=generator)
            pool.append(data.to(self.weights[0].device))
        handed_on = len(pool)
        recomputes = self.recomputes and any(tensor.requires_grad for tensor in pool)
        if self.config is None:
            # Without a pipeline, a gradient reaches the publisher through the tensor's uses, and a
            # recomputed layer hides what it takes.
            pool += self._taken()
        if recomputes:  # changes the order of sums, so it must be the same everywhere
            outputs = checkpoint(
                self._layers, microbatch, *pool, use_reentrant=self.number % 2 == 0
            )
        else:
            outputs = self._layers(microbatch, *pool)
        pool = [*pool[:handed_on], *outputs]
        if self.number == self.num_stages - 1:
            return sum(tensor.square().mean() for tensor in pool)
        handed = draw.sample(
            pool, draw.randint(0 if draw.random() < 0.2 else 1, min(4, len(pool)))
        )
        if (
            self.recomputes
        ):  # a tensor published in a recomputed layer must lead to the loss
            handed.append(sum(tensor.mean(0, keepdim=True) for tensor in pool))
        return _tree(
            draw, list({id(tensor): tensor for tensor in handed}.values()), outputs
        )

    def _layers(self, microbatch: int, *pool: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Apply the weights to the given and the taken tensors; publish some of the results."""
        draw = self._draw(microbatch, "layers")
        inputs = [*pool, *(self._taken() if self.config is not None else ())]
        outputs = []
        for weight in self.weights:
            left, right = draw.choice(inputs), draw.choice(inputs)
            outputs.append(torch.tanh(left @ weight) + right.mean(0, keepdim=True) / 2)
            inputs.append(outputs[-1])
        for name in self.publishes:
            self._publish(draw, name, outputs)
        return tuple(outputs)

    def _taken(self) -> list[torch.Tensor]:
        routed = [routes.take(name) for name in self.takes]
        return [tensor.float() for tensor in routed if tensor is not None]

    def _publish(
        self, draw: random.Random, name: str, outputs: list[torch.Tensor]
    ) -> None:
        index, choice = draw.randrange(len(outputs)), draw.random()
        if self.varies and choice < 0.3:
            routes.publish(name, None)
        elif choice < 0.5:
            routes.publish(name, outputs[index] > 0)
        elif choice < 0.7 and not self.recomputes:
            routes.publish(name, outputs[index].double())  # only takers use it
        else:
            published = routes.publish(name, outputs[index])
            assert published is not None
            outputs[index] = published

    def _draw(self, microbatch: int, purpose: str) -> random.Random:
        microbatch_key = microbatch if self.varies else ""
        return random.Random(f"{self.seed}.{self.number}.{purpose}.{microbatch_key}")


def _tree(
    draw: random.Random, handed: list[Any], outputs: tuple[torch.Tensor, ...]
) -> Any:
    """Return a tree of distinct tensors, some of which have no gradient."""
    leaves: list[Any] = [
        tensor.double() if draw.random() < 0.2 else tensor for tensor in handed
    ]
    leaves += draw.sample(
        [None, outputs[0] > 0, torch.arange(3), outputs[0].detach()], 1
    )
    shape = draw.randrange(4)
    if shape == 0:
        return leaves
    if shape == 1:
        return {"first": leaves[0], "rest": tuple(leaves[1:])}
    if shape == 2:
        return (leaves[:1], {"more": leaves[1:], "none": None})
    return leaves[0] if len(handed) == 1 else tuple(leaves)


def floats(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the floating-point tensors of a tree."""
    if isinstance(tree, torch.Tensor):
        if tree.is_floating_point():
            yield tree.float()
    elif tree is not None:
        for branch in tree.values() if isinstance(tree, dict) else tree:
            yield from floats(branch)


def names_of(seed: int, number: int, num_stages: int) -> tuple[list[str], list[str]]:
    """Return the names that a stage publishes and takes."""
    draw = random.Random(f"routes of {seed}")
    publishes: list[str] = []
    takes: list[str] = []
    for index in range(draw.randrange(4)):
        source = draw.randrange(num_stages)
        takers = [s for s in range(source + 1, num_stages) if draw.random() < 0.5]
        if not takers:
            continue
        if number == source:
            publishes.append(f"route{index}")
        if number in takers:
            takes.append(f"route{index}")
    return publishes, takes


def alone(seed: int, num_stages: int, num_microbatches: int) -> tuple[Any, Any]:
    """Return the losses, and the gradients by stage, of one process without a pipeline."""
    stages = [RandomStage(None, seed, s, num_stages) for s in range(num_stages)]
    losses = []
    for microbatch in range(num_microbatches):
        output: Any = None
        for stage in stages:
            stage.set_input_tensor([output])
            output = stage(microbatch)
        losses.append(output.item())
        (output / num_microbatches).backward()
    return losses, [[weight.grad for weight in stage.weights] for stage in stages]
