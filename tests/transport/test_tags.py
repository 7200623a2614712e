from __future__ import annotations

import itertools

import pytest

from megatron_ext.errors import TransportError
from megatron_ext.transport.base import Key
from megatron_ext.transport.tags import NUM_STEPS, Tags


def test_each_key_has_a_tag_of_its_own_whatever_the_step() -> None:
    tags = Tags()
    keys = [
        Key(kind, stage, microbatch, part)
        for kind, stage, microbatch, part in itertools.product(
            ("F", "B", "C"), (0, 1, 4095), (0, 1, (1 << 24) - 1), (0, 7)
        )
    ]
    assert len({tags[key] for key in keys}) == len(keys)
    assert all(tags[key] % NUM_STEPS == 0 and tags[key] < 1 << 64 for key in keys)
    assert all(tags[Key(*key)] == tags[key] for key in keys)


@pytest.mark.parametrize(
    "key", [Key("F", 4096, 0), Key("B", 0, 1 << 24), Key("B", 0, 0, 8)], ids=str
)
def test_a_number_that_is_too_large_is_refused(key: Key) -> None:
    tags = Tags()
    with pytest.raises(TransportError, match="at most 4096 stages, 16777216 micro-batches and 8"):
        tags[key]
    assert key not in tags
