"""Forwards and backwards of Megatron's own schedules as spans.

Megatron passes micro-batch and chunk to a forward. A backward gets only the output that it starts
from, so forwards record micro-batch and chunk under the identity of their output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ext.tools.trace import session
from megatron_ext.tools.trace.activations import kept_bytes
from megatron_ext.tools.trace.records import ACTION_NAMES

__all__ = ["backward", "forward"]


def forward(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run Megatron's `forward_step`, as a span if a training step is in progress."""
    observer = session.current()
    assert observer is not None
    if not observer.activity.is_watched:
        return call(*args, **kwargs)
    chunk, microbatch = kwargs.get("vp_stage") or 0, kwargs.get("current_microbatch") or 0

    def run() -> Any:
        recorder, kept = observer.recorder, observer.activation_bytes
        if recorder is None or chunk in kept or not recorder.active:
            return call(*args, **kwargs)
        result = call(*args, **kwargs)
        outputs = result[0] if isinstance(result[0], list) else [result[0]]
        kept[chunk] = kept_bytes(outputs, args[2])
        return result

    result = _run(observer, "F", chunk, microbatch, run)
    observer.forwards[_identity(result[0])] = chunk, microbatch
    return result


def backward(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run Megatron's `backward_step`, as a span if a training step is in progress."""
    observer = session.current()
    assert observer is not None
    if not observer.activity.is_watched:
        return call(*args, **kwargs)
    output = args[1] if len(args) > 1 else kwargs["output_tensor"]
    chunk, microbatch = observer.forwards.pop(_identity(output), (0, 0))
    return _run(observer, "B", chunk, microbatch, lambda: call(*args, **kwargs))


def _identity(output: Any) -> int:
    """Return the tensor itself: Megatron wraps a single output into a list and unwraps it again."""
    return id(output[0] if isinstance(output, list) else output)


def _run(
    observer: session.Session, kind: str, chunk: int, microbatch: int, call: Callable[[], Any]
) -> Any:
    from megatron.core import parallel_state

    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    stage = chunk * parallel_state.get_pipeline_model_parallel_world_size() + pp_rank
    observer.activity.now(f"runs {stage}{kind}{microbatch}")
    recorder = observer.recorder
    if recorder is None or not recorder.active:
        result = call()
    else:
        begin = recorder.stamp()
        result = call()
        about = {
            "microbatch": microbatch,
            "model_chunk": chunk,
            "stage": stage,
            "pp_rank": pp_rank,
        }
        recorder.add(ACTION_NAMES[kind], begin, about)
    observer.activity.now(f"has run {stage}{kind}{microbatch} and exchanges tensors")
    return result
