"""Our flags are upstream's: same spellings, defaults, types, choices."""

from __future__ import annotations

import inspect
from argparse import ArgumentParser, ArgumentTypeError

import pytest

from tests.ranks import run_ranks


def differences() -> list[str]:
    from megatron.training.arguments import add_megatron_arguments

    from megatron_ext.training.trainer_flags import add_flags

    upstream, ours = ArgumentParser(allow_abbrev=False), ArgumentParser(allow_abbrev=False)
    inspect.unwrap(add_megatron_arguments)(upstream)  # without the defaults of the device in use
    add_flags(ours, local_rank=0)
    theirs = upstream._option_string_actions
    found = []
    for option, action in ours._option_string_actions.items():
        if option in {"-h", "--help"}:
            continue
        if option not in theirs:
            found.append(f"{option} is not upstream's")
            continue
        other = theirs[option]
        for name in ("dest", "default", "nargs", "const"):
            mine, its = getattr(action, name), getattr(other, name)
            if name == "dest" or option != "--local-rank":
                found += [f"{option}: {name} {mine!r} != {its!r}"] if mine != its else []
        if (action.type or str) != (other.type or str) and action.type in {int, float, str}:
            found.append(f"{option}: type {action.type} != {other.type}")
        extra = set(action.choices or ()) - set(other.choices or action.choices or ())
        found += [f"{option}: choices {extra} are not upstream's"] if extra else []
    return found


@pytest.mark.tree
@pytest.mark.usefixtures("megatron_lm_path")
def test_every_flag_means_what_it_means_upstream() -> None:
    expected = ["--tokenizer-type: choices {'ByteLevelTokenizer'} are not upstream's"]
    assert run_ranks(1, differences) == [expected]


def parsed_patterns() -> list[object]:
    from megatron_ext.training.trainer_flags import pattern

    values: list[object] = [pattern(text) for text in ("3", "[1,0]", "([0]*2+[1])*2")]
    for text in ("two", "__import__('os')", "(1,2)", "[1", "[1]*[2]"):
        with pytest.raises(ArgumentTypeError):
            pattern(text)
    return values


def test_layer_patterns() -> None:
    assert run_ranks(1, parsed_patterns) == [[3, [1, 0], [0, 0, 1, 0, 0, 1]]]


def generated_flags() -> dict[str, object]:
    from megatron_ext.training.trainer_flags import add_flags

    parser = ArgumentParser()
    add_flags(parser, local_rank=3)
    argv = (
        "--norm-epsilon 1e-6 --recompute-modules core_attn mlp --attention-backend local "
        "--disable-bias-linear --no-clone-scatter-output-in-embedding --fp8-format hybrid"
    )
    args, unknown = parser.parse_known_args(argv.split())
    return {
        "epsilon": args.layernorm_epsilon,
        "modules": args.recompute_modules,
        "backend": args.attention_backend.name,
        "negated": (args.add_bias_linear, args.clone_scatter_output_in_embedding),
        "default": args.num_query_groups,
        "local_rank": args.local_rank,
        "unknown": unknown,
    }


def test_flags_are_generated_from_the_dataclasses_of_core() -> None:
    (found,) = run_ranks(1, generated_flags)
    assert found == {
        "epsilon": 1e-6,
        "modules": ["core_attn", "mlp"],
        "backend": "local",
        "negated": (False, False),
        "default": 1,
        "local_rank": 3,
        "unknown": ["--fp8-format", "hybrid"],
    }
