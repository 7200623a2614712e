"""Stages drawn at random: what they take, make, publish and hand on, from a seed.

Run one after the other they are a model without a pipeline, whose gradients are the right ones.
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
        seed: Of the model.
        number: Of the stage.
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
        routes.declare(self, publishes=self.publishes, takes=self.takes, boundary=boundary)

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
        recomputes = self.recomputes and any(each.requires_grad for each in pool)
        if self.config is None:
            # Without a pipeline a gradient reaches its publisher through what it was taken for,
            # and a recomputed layer hides what it takes.
            pool += self._taken()
        if recomputes:  # which is another order of sums, so it has to be the same everywhere
            made = checkpoint(self._layers, microbatch, *pool, use_reentrant=self.number % 2 == 0)
        else:
            made = self._layers(microbatch, *pool)
        pool = [*pool[:handed_on], *made]
        if self.number == self.num_stages - 1:
            return sum(each.square().mean() for each in pool)
        handed = draw.sample(pool, draw.randint(0 if draw.random() < 0.2 else 1, min(4, len(pool))))
        if self.recomputes:  # what is published in a recomputed layer has to lead to the loss
            handed.append(sum(each.mean(0, keepdim=True) for each in pool))
        return _tree(draw, list({id(each): each for each in handed}.values()), made)

    def _layers(self, microbatch: int, *pool: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what the weights make of what is here and of what is taken; publish some of it."""
        draw = self._draw(microbatch, "layers")
        known = [*pool, *(self._taken() if self.config is not None else ())]
        made = []
        for weight in self.weights:
            one, other = draw.choice(known), draw.choice(known)
            made.append(torch.tanh(one @ weight) + other.mean(0, keepdim=True) / 2)
            known.append(made[-1])
        for name in self.publishes:
            self._publish(draw, name, made)
        return tuple(made)

    def _taken(self) -> list[torch.Tensor]:
        taken = [routes.take(name) for name in self.takes]
        return [each.float() for each in taken if each is not None]

    def _publish(self, draw: random.Random, name: str, made: list[torch.Tensor]) -> None:
        index, choice = draw.randrange(len(made)), draw.random()
        if self.varies and choice < 0.3:
            routes.publish(name, None)
        elif choice < 0.5:
            routes.publish(name, made[index] > 0)
        elif choice < 0.7 and not self.recomputes:
            routes.publish(name, made[index].double())  # which only takers use
        else:
            published = routes.publish(name, made[index])
            assert published is not None
            made[index] = published

    def _draw(self, microbatch: int, what: str) -> random.Random:
        each = microbatch if self.varies else ""
        return random.Random(f"{self.seed}.{self.number}.{what}.{each}")


def _tree(draw: random.Random, handed: list[Any], made: tuple[torch.Tensor, ...]) -> Any:
    """Return a tree of tensors, each once, with some that have no gradient."""
    leaves: list[Any] = [each.double() if draw.random() < 0.2 else each for each in handed]
    leaves += draw.sample([None, made[0] > 0, torch.arange(3), made[0].detach()], 1)
    shape = draw.randrange(4)
    if shape == 0:
        return leaves
    if shape == 1:
        return {"first": leaves[0], "rest": tuple(leaves[1:])}
    if shape == 2:
        return (leaves[:1], {"more": leaves[1:], "none": None})
    return leaves[0] if len(handed) == 1 else tuple(leaves)


def floats(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a tree that are numbers to compute with."""
    if isinstance(tree, torch.Tensor):
        if tree.is_floating_point():
            yield tree.float()
    elif tree is not None:
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from floats(each)


def names_of(seed: int, number: int, num_stages: int) -> tuple[list[str], list[str]]:
    """Return what a stage publishes and takes."""
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
    """Return losses, and gradients by stage, of one process without a pipeline."""
    stages = [RandomStage(None, seed, s, num_stages) for s in range(num_stages)]
    losses = []
    for microbatch in range(num_microbatches):
        made: Any = None
        for stage in stages:
            stage.set_input_tensor([made])
            made = stage(microbatch)
        losses.append(made.item())
        (made / num_microbatches).backward()
    return losses, [[weight.grad for weight in stage.weights] for stage in stages]
