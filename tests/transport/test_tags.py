from __future__ import annotations

import itertools
from typing import get_args

import pytest

from megatron_ext.errors import TransportError
from megatron_ext.message import Message, MessageKind
from megatron_ext.transport.native_transport import NOTE, NUM_STEPS, WAKE, Tags


def test_each_message_has_a_tag_of_its_own_whatever_the_step() -> None:
    tags = Tags()
    messages = [
        Message(*fields)
        for fields in itertools.product(
            get_args(MessageKind),
            (0, 1, 2047),
            (0, 1, (1 << 17) - 1),
            (0, 1, 63),
            (0, 7),
            (False, True),
        )
    ]
    messages += [message.notice for message in messages]
    assert len({tags[message] for message in messages}) == len(messages)
    assert not {NOTE, WAKE} & set(tags.values())
    assert all(
        tags[message] % NUM_STEPS == 0 and tags[message] < 1 << 64
        for message in messages
    )
    assert all(tags[Message(*message)] == tags[message] for message in messages)


@pytest.mark.parametrize(
    "message",
    [
        Message("F", 2048, 0),
        Message("B", 0, 1 << 17),
        Message("B", 0, 0, part=8),
        Message("B", 0, 0, slice=64),
    ],
    ids=str,
)
def test_a_number_that_is_too_large_is_refused(message: Message) -> None:
    tags = Tags()
    with pytest.raises(
        TransportError, match="at most 2048 stages, 131072 micro-batches, 64"
    ):
        tags[message]
    assert message not in tags
