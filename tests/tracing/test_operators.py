"""The operators inside one layer, of trainings with a planted fault."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.tools.compare.locate import locate
from megatron_ext.tools.compare.operators import first_operator, place_of
from megatron_ext.tracing.digest_files import OPERATORS
from megatron_ext.tracing.operator_files import Place, why_unavailable
from tests.ranks import run_ranks
from tests.tracing.recorded import Training, train

pytestmark = pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable())


def wrong_product(chunks: list[Any]) -> AbstractContextManager[Any]:
    """Change the result of the second product of layer 2's MLP, which is not the layer's output."""
    from tests.mutations.silent_faults import at_output

    return at_output(2, "mlp.linear_fc2", lambda output: output * 1.001, 1)(chunks)


def wrong_gradient(chunks: list[Any]) -> AbstractContextManager[Any]:
    """Change the gradient of layer 2's MLP."""
    from tests.mutations.silent_faults import at_output

    def change(output: Any) -> Any:
        return output + 1e-3 * (output.detach() - output)

    return at_output(2, "mlp", change, 1)(chunks)


def _train_both(own: Training, other: Training, places: dict[str, str]) -> None:
    for fault in (wrong_product, wrong_gradient):
        for what, place in (("digests", ""), ("operators", places[fault.__name__])):
            os.environ[OPERATORS] = place
            name = f"{fault.__name__}-{what}"
            train(replace(own, folder=f"{own.folder}-{name}"))
            train(replace(other, folder=f"{other.folder}-{name}"), fault)


@pytest.mark.short_s(10)
def test_the_first_wrong_operator_of_the_first_wrong_layer_is_named(
    tmp_path: Path,
) -> None:
    """Megatron's own schedule and zb-v, which cuts the model otherwise and splits backwards."""
    own = Training(str(tmp_path / "own"), num_steps=1)
    other = replace(own, folder=str(tmp_path / "other"), schedule="zb-v")
    places = {
        "wrong_product": Place(1, 1, "forward", "decoder.layers.2"),
        "wrong_gradient": Place(1, 1, "backward", "decoder.layers.2"),
    }
    texts = {name: str(place) for name, place in places.items()}
    run_ranks(2, _train_both, own, other, texts, timeout_s=280)
    sentences = {}
    for name, place in places.items():
        folders_by_content = {}
        for what in ("digests", "operators"):
            folders = [tmp_path / f"{run}-{name}-{what}" for run in ("own", "other")]
            folders_by_content[what] = folders
        difference = locate(*folders_by_content["digests"])
        assert difference is not None
        assert place_of(difference) == place
        sentences[name] = first_operator(*folders_by_content["operators"]).sentence
    changed = "in the forward pass of decoder.layers.2: aten.add.Tensor -> [16, 1, 32]"
    assert changed in sentences["wrong_product"]
    assert (
        "before it, only the candidate ran aten.mul.Tensor -> [16, 1, 32]"
        in sentences["wrong_product"]
    )
    assert "in the backward pass of decoder.layers.2" in sentences["wrong_gradient"]
    assert (
        "only the candidate ran aten.mul.Tensor -> [16, 1, 32]"
        in sentences["wrong_gradient"]
    )
