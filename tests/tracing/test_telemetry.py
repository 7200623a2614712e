"""Spans for Megatron's OpenTelemetry: in the groups that it has enabled, below its own."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from megatron_ext.errors import TransportError
from megatron_ext.tracing.records import ACTION_NAMES
from tests.pipelines import make_pipeline, use
from tests.ranks import run_ranks
from tests.runtime import toy

M = 3
BOTH = "microbatch", "communication"


class Span(NamedTuple):
    """A span that has ended."""

    name: str
    parent: str | None
    about: dict[str, Any]


def _made_up(groups: tuple[str, ...]) -> Callable[[], list[Span]]:
    """Stand in for nemo-lens, with its interface; return a function that lists the spans."""
    ended: list[Span] = []
    under_way: list[str] = []

    class Recording:
        def __init__(self, about: dict[str, Any]) -> None:
            self.about = about

        def set_attributes(self, about: dict[str, Any]) -> None:
            self.about |= about

    @contextmanager
    def managed_span(group: str, name: str, **about: Any) -> Iterator[Recording | None]:
        if group not in groups:
            yield None
            return
        span = Recording(about)
        parent = under_way[-1] if under_way else None
        under_way.append(name)
        yield span
        assert under_way.pop() == name, "spans end in another order than they began"
        ended.append(Span(name, parent, span.about))

    nemo, lens, state, helpers = map(
        ModuleType, ("nemo", "nemo.lens", "nemo.lens.state", "nemo.lens.helpers")
    )
    state.is_span_group_enabled = groups.__contains__  # type: ignore[attr-defined]
    helpers.managed_span = managed_span  # type: ignore[attr-defined]
    sys.modules |= {module.__name__: module for module in (nemo, lens, state, helpers)}
    return lambda: ended


def _real(groups: tuple[str, ...]) -> Callable[[], list[Span]]:
    """Set up nemo-lens; return a function that lists the spans."""
    from nemo.lens.state import set_enabled_span_groups
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import (
        InMemorySpanExporter,
    )

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    set_enabled_span_groups(frozenset(groups))

    def ended() -> list[Span]:
        spans = exporter.get_finished_spans()
        names = {span.context.span_id: span.name for span in spans}
        return [
            Span(
                span.name,
                span.parent and names[span.parent.span_id],
                dict(span.attributes or {}),
            )
            for span in spans
        ]

    return ended


def _train(
    set_up: Callable[[tuple[str, ...]], Callable[[], list[Span]]],
    groups: tuple[str, ...],
    schedule: str,
    fails: bool,
) -> list[Span]:
    """Run a step on each of two ranks below a span of Megatron's; return the spans."""
    ended = set_up(groups)
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from nemo.lens.helpers import managed_span

    toy.start(2)
    use(make_pipeline(schedule, 2, M, transport="shm") if schedule else None)

    def forward_step(data: Any, model: Any) -> Any:
        if fails:
            raise ZeroDivisionError
        return toy.forward_step(data, model)

    try:
        with managed_span(BOTH[0], "megatron.step"):
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=toy.samples(M),
                model=toy.chunks(toy.config(), [torch.distributed.get_rank()]),
                num_microbatches=M,
                seq_length=toy.LENGTH,
                micro_batch_size=toy.BATCH,
            )
    except (ZeroDivisionError, TransportError):
        assert fails
    return [span for span in ended() if span.name != "megatron.step"]


@pytest.fixture(
    params=[
        "made up",
        pytest.param(
            "nemo-lens",
            marks=pytest.mark.skipif(
                not (find_spec("nemo") and find_spec("opentelemetry")),
                reason="nemo-lens, of github.com/NVIDIA-NeMo/Lens, is not installed",
            ),
        ),
    ]
)
def set_up(request: pytest.FixtureRequest) -> Any:
    """Sets up telemetry in a rank."""
    return _made_up if request.param == "made up" else _real


def test_every_action_and_message_is_a_span_below_the_step(set_up: Any) -> None:
    by_rank = run_ranks(2, _train, set_up, BOTH, "zb-h1", False)
    for rank, ended in enumerate(by_rank):
        spans = [span for span in ended if span.name.startswith("megatron_ext.")]
        assert {span.parent for span in spans} == {"megatron.step"}
        theirs = {
            span.parent for span in ended if span not in spans
        }  # of forward_step and so on
        assert theirs <= {f"megatron_ext.{name}" for name in ACTION_NAMES.values()}
        actions = Counter(span.name.removeprefix("megatron_ext.") for span in spans)
        assert actions["forward"] == actions["weight_gradient"] == M
        assert actions["backward"] + actions["input_gradient"] == M
        assert actions["send"] == actions["receive"] == M
        forwards = [span.about for span in spans if span.name == "megatron_ext.forward"]
        assert forwards == [{"stage": rank, "microbatch": m} for m in range(M)]
        sent = [span.about for span in spans if span.name == "megatron_ext.send"]
        size = 4 * toy.LENGTH * toy.BATCH * toy.WIDTH
        assert {(about["to"], about["bytes"]) for about in sent} == {(1 - rank, size)}


def test_groups_that_are_not_enabled_have_no_spans(set_up: Any) -> None:
    for spans in run_ranks(2, _train, set_up, BOTH[1:], "1f1b", False):
        assert {span.name.split(".")[1] for span in spans} <= {
            "send",
            "receive",
            "wait",
        }
    for spans in run_ranks(2, _train, set_up, ("step",), "1f1b", False):
        assert spans == []


def test_megatrons_own_schedules_have_its_own_spans(set_up: Any) -> None:
    for spans in run_ranks(2, _train, set_up, BOTH, "", False):
        assert not any(span.name.startswith("megatron_ext.") for span in spans)


def test_a_step_that_fails_leaves_no_span_open(set_up: Any) -> None:
    first, _ = run_ranks(2, _train, set_up, BOTH, "1f1b", True)
    assert [span.name for span in first][-1:] == ["megatron_ext.forward"]
