"""The doctor before a flight: what does not fit, hangs or waits, and flags that are better."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.planning.hardware import parse_devices
from megatron_ext.tools.doctor import flight as flight_checks
from megatron_ext.tools.doctor.flight import Diagnosis, check_training
from megatron_ext.upstream.flag_list import megatron_flags
from tests.config.test_schedule_flags import outcomes
from tests.ranks import require_training, run_ranks

SIZES = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --swiglu --seq-length 4096 "
    "--max-position-embeddings 4096 --bf16 --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --train-iters 10 --eval-interval 10 "
)
GPT = SIZES + "--vocab-size 32000 "


def flight(
    flags: str, devices: str = "8xh100", sizes: str = GPT
) -> dict[str, Diagnosis]:
    words = f"{sizes}{flags}".split()
    found = list(check_training(["pretrain_gpt.py", *words], *parse_devices(devices)))
    for finding in found:
        assert finding.remedy or finding.level == "OK", finding
        assert "\n" not in str(finding)
    return {finding.check: finding for finding in found}


def may_have(flag: str) -> bool:
    """Return whether the Megatron that is installed here, if any, has a flag."""
    flags = megatron_flags()
    return not flags or any(flag in known.names for known in flags)


LISTED = pytest.mark.skipif(
    not megatron_flags(), reason="no training loop is installed here"
)
ONE = "--micro-batch-size 1 --global-batch-size {} "
PP = "--pipeline-model-parallel-size {} "
DEVICE = ONE.format(64) + PP.format(2)
TOO_MUCH = "--micro-batch-size 4 --global-batch-size 64 "
CASES = {
    "optimizer and activations": (TOO_MUCH, "memory", "FAIL", r"needs 1\d\d\.\d GiB of 79.1"),
    "fits": (ONE.format(64) + "--use-distributed-optimizer", "memory", "OK", "needs"),
    "too few micro-batches": (
        ONE.format(2) + PP.format(8) + "--use-distributed-optimizer", "idle devices", "WARN",
        r"devices wait for 7\d %",
    ),
    "devices left over": (ONE.format(64) + PP.format(5), "layout", "FAIL", "world size 8"),
    "layers left over": (
        ONE.format(64) + PP.format(2) + "--num-layers 33", "layout", "FAIL",
        "33 layers do not divide evenly into 2 stages",
    ),
    "experts on too many ranks": (
        ONE.format(64) + PP.format(8) + "--num-experts 8 --expert-model-parallel-size 2", "layout",
        "FAIL", "--expert-model-parallel-size 2 does not divide the 1 ranks of a stage",
    ),
    "layers of a hybrid left over": (
        ONE.format(64) + PP.format(4) + "--hybrid-layer-pattern M*M-M*", "layout", "FAIL",
        "^6 layers do not divide evenly into 4 stages",
    ),
    "no tokens": (DEVICE + "--seq-length 0", "training", "FAIL", "--seq-length is 0"),
    "letters of another model": (
        DEVICE + "--pipeline-model-parallel-layout Et|tL", "layout", "FAIL", "has 2 layers",
    ),
    "a stage without a layer": (
        ONE.format(64) + PP.format(4) + "--use-distributed-optimizer --num-layers 24 "
        "--pipeline-model-parallel-layout Et*12||t*6|t*6L", "memory", "OK", "needs",
    ),
    "experts without a number": (
        ONE.format(64) + PP.format(4) + "--hybrid-layer-pattern M*|M-|M*|ME", "layout", "FAIL",
        r"has expert layers \(E\)",
    ),
    "one stage with ends": (
        ONE.format(64) + PP.format(1) + "--forward-backward-disaggregating --hidden-dropout 0 "
        "--attention-dropout 0 --decoder-last-pipeline-num-layers 1", "training", "OK", "accepts",
    ),
    "some layers recomputed": (
        TOO_MUCH + "--recompute-granularity full --recompute-method block "
        "--recompute-num-layers 4", "layout", "OK", "not checked: with --recompute-method block",
    ),
    "weights that another sharding shards": (
        TOO_MUCH + "--use-megatron-fsdp --ckpt-format fsdp_dtensor", "layout", "OK", "not checked",
    ),
    "states on the host": (TOO_MUCH + "--optimizer-cpu-offload", "layout", "OK", "not checked"),
    "states in few bits": (
        TOO_MUCH + "--use-precision-aware-optimizer --exp-avg-dtype bf16", "layout", "OK",
        "not checked: with the types of",
    ),
    "slices": (
        DEVICE + "--pipeline-schedule zb-v --pipeline-slices 4 --transformer-impl local "
        "--no-masked-softmax-fusion", "layout", "OK", "would count whole micro-batches",
    ),
    "slices by length": (
        DEVICE + "--pipeline-schedule zb-h1 --pipeline-slice-tokens auto --transformer-impl local "
        "--no-masked-softmax-fusion --use-distributed-optimizer", "memory", "OK",
        "if all micro-batches have .* tokens, in slices of about",
    ),
    "too many slices by length": (
        DEVICE + "--pipeline-schedule zb-h1 --pipeline-slice-tokens 1 --transformer-impl local "
        "--no-masked-softmax-fusion", "training", "FAIL",
        "--seq-length 4096 would have 4096 slices",
    ),
    "an order without a bound": (
        DEVICE + "--use-dpp --dpp-policy breadth-first", "layout", "OK", "may keep all",
    ),
    "an order with a bound": (
        DEVICE + "--use-dpp --dpp-extra-activations 3 --use-distributed-optimizer", "memory", "OK",
        r"1f1b\), plus --dpp-extra-activations 3",
    ),
    "another order of a schedule": (
        ONE.format(64) + PP.format(4) + "--enable-bitpipe-schedule --bitpipe-order paper", "layout",
        "OK", "does not support --bitpipe-order paper",
    ),
    "the usual order of a schedule": (
        ONE.format(64) + PP.format(4) + "--enable-bitpipe-schedule --bitpipe-order zb "
        "--use-distributed-optimizer", "memory", "OK", "needs",
    ),
    "no letter of a layout": (
        DEVICE + "--pipeline-model-parallel-layout Ex|tL", "layout", "FAIL", "Ex|tL has x",
    ),
    "no layout": (DEVICE + "--pipeline-model-parallel-layout 4", "layout", "FAIL", "4 contains 4"),
    "roles": (
        ONE.format(64) + PP.format(4) + "--forward-backward-disaggregating --hidden-dropout 0 "
        "--attention-dropout 0 --num-layers-per-virtual-pipeline-stage 3", "training", "OK",
        "--forward-backward-disaggregating accepts these flags",
    ),
    "no ranks": (
        ONE.format(64) + PP.format(0), "training", "FAIL", "size 0 must be a whole number",
    ),
    "no number": (ONE.format(64) + PP.format("x"), "training", "FAIL", "size (is )?'x'"),
    "no sizes": (
        ONE.format(64) + "--hidden-size 0", "training", "FAIL", "--hidden-size is 0",
    ),
    "#1450": (DEVICE + "--num-virtual-stages-per-pipeline-rank 2 --variable-seq-lengths "
              "--moe-token-dispatcher-type alltoall", "known hang", "WARN", "1450"),
    "#5100": (ONE.format(64) + PP.format(4) + "--variable-seq-lengths "
              "--moe-token-dispatcher-type alltoall", "known hang", "WARN", "5100"),
    "#1852": (
        DEVICE + "--pipeline-model-parallel-layout Et*32|L", "known hang", "WARN", "1852",
    ),
    "graphs": (DEVICE + "--cuda-graph-impl local", "known hang", "WARN", "3802"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_findings(name: str) -> None:
    flags, check, level, text = CASES[name]
    if "--hybrid-layer-pattern" in flags and not may_have("--hybrid-layer-pattern"):
        pytest.skip("this release has no --hybrid-layer-pattern")
    finding = flight(flags)[check]
    assert finding.level == level
    assert re.search(text, finding.finding), finding.finding
    if name.endswith("left over") and name.startswith("layers"):
        remedy = finding.remedy.removeprefix("add ").partition(",")[0]
        after = flight(f"{flags} {remedy}")
        assert "memory" in after
        assert "FAIL" not in {each.level for each in after.values()}


def test_ctrl_c_within_a_search_ends_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    search = flight_checks.search

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        found = search(*args, **kwargs)
        found.is_complete = False  # as after Ctrl-C, with the best so far
        return found

    monkeypatch.setattr(flight_checks, "search", interrupted)
    with pytest.raises(KeyboardInterrupt):
        flight(DEVICE)


def test_experts_and_reductions_on_many_devices() -> None:
    flags = (
        ONE.format(256)
        + "--num-experts 8 --expert-model-parallel-size 8 --overlap-grad-reduce"
    )
    assert "5749" in flight(flags, "64xh100")["known hang"].finding
    assert "known hang" not in flight(flags, "32xh100")


def test_the_precision_of_the_flags_counts() -> None:
    steps = []
    for precision in ("", "--fp8-format hybrid", "--fp4-format e2m1"):
        found = flight(ONE.format(64) + precision, "8xb200")["idle devices"].finding
        steps.append(float(re.search(r"([\d.]+) s per step", found)[1]))  # type: ignore[index]
    assert steps == sorted(set(steps), reverse=True)
    lacking = flight(ONE.format(64) + "--fp4-format e2m1")["layout"]
    assert str(lacking) == "FAIL layout: h100 has no 4-bit matrix products; use fp8"


@LISTED
def test_flags_that_megatron_lacks_are_named() -> None:
    found = flight(ONE.format(64) + "--num-layrs 4 --no-position-embedding")
    assert str(found["training"]) == (
        "FAIL training: unknown argument --num-layrs; did you mean --num-layers?"
    )


@LISTED
def test_flags_of_another_script_may_be_its_own(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("parser.add_argument('--own', type=int)\n")
    words = f"{script} {GPT}{ONE.format(64)}--own 3 --num-layrs 4 --zzz 1".split()
    found = [
        str(finding) for finding in check_training(words, *parse_devices("8xh100"))
    ]
    unknown = "is unknown to the installed Megatron"
    assert found[:2] == [
        f"WARN unknown flag: --num-layrs {unknown}; did you mean --num-layers?",
        f"WARN unknown flag: --zzz {unknown}; does your script define it?",
    ]
    [wrong] = check_training([*words, "--own", "x"], *parse_devices("8xh100"))
    assert str(wrong) == "FAIL training: --own is 'x'; it must be a whole number"


def test_messages_of_other_devices_are_not_compared_with_the_memory_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)  # the standard library is enough
    flags = DEVICE + "--pipeline-schedule zb-h1 --pipeline-transport shm"
    assert flight(flags)["message buffers"].finding.endswith(
        "MiB for a pipeline on one machine"
    )


@pytest.mark.parametrize(
    "ours", ["--pipeline-schedule zb-h1", "--pipeline-transport shm"]
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_messages_of_ours_do_not_hang(ours: str, ranks: int) -> None:
    flags = (
        ONE.format(64) + PP.format(ranks) + "--num-virtual-stages-per-pipeline-rank 2 "
    )
    flags += "--variable-seq-lengths --moe-token-dispatcher-type alltoall "
    assert "known hang" in flight(flags)
    assert "known hang" not in flight(flags + ours)


def test_a_vocabulary_of_the_tokenizer() -> None:
    found = flight(
        ONE.format(64) + "--tokenizer-type HuggingFaceTokenizer", sizes=SIZES
    )["layout"]
    assert (found.level, found.remedy) == (
        "OK",
        "add --padded-vocab-size with that size",
    )


def test_flags_that_others_replace_are_named() -> None:
    flags = TOO_MUCH + PP.format(2) + "--use-dpp --recompute-granularity selective "
    remedy = flight(flags + "--recompute-modules mlp")["memory"].remedy
    words, _, better = remedy.partition(": ")
    replaced = re.search(r" instead of ([^(]+) \(", words)
    assert replaced, remedy
    old = {"--use-dpp", "--recompute-granularity", "--recompute-modules"}
    assert {*replaced[1].split(", ")} == old - {*better.split()}


def test_weights_that_wait_count() -> None:
    """Each keeps its operands on the rank; `auto` takes the number that fits."""
    experts = (
        "--use-distributed-optimizer --num-layers 16 --hidden-size 2048 --num-experts 8 "
        "--moe-router-topk 2 --moe-ffn-hidden-size 2048 --expert-model-parallel-size 4 "
        "--moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm "
        "--pipeline-schedule zb-h1 --transformer-impl local --seq-length 1024 "
    )
    flags = ONE.format(64) + PP.format(4) + experts
    needed_gib = []
    for waiting in ("0", "4", "8", "auto"):
        found = flight(f"{flags}--pipeline-waiting-weights {waiting}", "16xh100")
        needed = re.search(r"needs ([\d.]+) GiB", found["memory"].finding)
        assert needed, found
        needed_gib.append(float(needed[1]))
    assert needed_gib[0] < needed_gib[1] < needed_gib[2] == needed_gib[3]


@pytest.mark.parametrize("name", ["optimizer and activations", "too few micro-batches"])
def test_the_flags_that_it_names_are_better_and_taken(name: str) -> None:
    flags, check, *_ = CASES[name]
    before = flight(flags)
    better = before[check].remedy.partition(": ")[2].replace("'", "")
    after = flight(better)
    assert after["memory"].level == "OK"
    assert "FAIL" not in {finding.level for finding in after.values()}
    if name == "too few micro-batches":
        step, old = (float(re.search(r"([\d.]+) s per step", each["idle devices"].finding)[1])  # type: ignore[index]
                     for each in (after, before))  # fmt: skip
        assert step < 0.8 * old
    require_training()
    rest = "--train-iters 5 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 31999"
    taken = run_ranks(1, outcomes, [("gpt", f"{SIZES}{rest} {better}", 8)])[0]
    assert isinstance(taken[0], dict), taken
