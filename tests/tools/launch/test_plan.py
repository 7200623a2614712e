"""Plans: from hosts and flags to the command of each host, without running anything."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ext.errors import LaunchError
from megatron_ext.tools.launch.attempts import shown_ranks
from megatron_ext.tools.launch.hostfile import parse, read
from megatron_ext.tools.launch.plan import JobPlan, Parallel, flag_value

TP2_PP3 = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 3"
PP4_BITPIPE = "--pipeline-model-parallel-size 4 --enable-bitpipe-schedule"
HOSTFILES = Path(__file__).parents[3] / "hostfiles"


def plan_of(
    text: str, command: str = "train.py", nproc: int = 0, **options: object
) -> JobPlan:
    hosts = tuple(replace(host, slots=host.slots or nproc) for host in parse(text))
    plan = JobPlan("run", hosts, tuple(command.split()), "/work dir", "/bin/python")
    return replace(plan, **options)


def test_the_commands_of_two_hosts_are_these() -> None:
    plan = plan_of(
        "a:2 addr=10.0.0.1\nb:2 addr=10.0.0.2 env.X=1",
        "pretrain_gpt.py --pipeline-model-parallel-size 2 --moe-layer-freq ([0]*1+[1]*3)",
        env={"OMP_NUM_THREADS": "1"},
        num_microbatches=4,
    )
    common = (
        "--nproc-per-node 2 --master-addr 10.0.0.1 --master-port 29500 --max-restarts 0"
    )
    script = (
        "-m megatron_ext pretrain_gpt.py --pipeline-model-parallel-size 2 --moe-layer-freq "
        "'([0]*1+[1]*3)' --global-batch-size 8"
    )
    start = "/bin/python -m torch.distributed.run --nnodes 2 --node-rank"
    assert plan.completed().dry_run() == (
        f"# a\ncd '/work dir' && OMP_NUM_THREADS=1 {start} 0 {common} {script}\n\n"
        f"# b\ncd '/work dir' && OMP_NUM_THREADS=1 X=\"${{X?}}\" {start} 1 {common} {script}\n"
    )


def test_a_dry_run_shows_no_secrets_and_takes_them_from_the_shell() -> None:
    secrets = {
        "HF_TOKEN": "hf_1",
        "WANDB_API_KEY": "w2",
        "MINE": "m3",
        "NCCL_DEBUG": "INFO",
    }
    plan = replace(plan_of("a env.OF_HOST=h4", per_node=True, workdir="/"), env=secrets)
    plan = replace(plan, command=("env",))
    _, command = plan.dry_run().splitlines()
    assert not [value for value in ("hf_1", "w2", "m3", "h4") if value in command]
    assert "NCCL_DEBUG=INFO" in command
    environment = {"PATH": os.environ["PATH"], **secrets, "OF_HOST": "h4"}
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert {"HF_TOKEN=hf_1", "MINE=m3", "OF_HOST=h4"} <= set(done.stdout.splitlines())
    del environment["MINE"]
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode != 0
    assert "MINE: " in done.stderr


@pytest.mark.parametrize("word", ["caf\udce9 1", "a\u00a0b", "\x1b[2J'\\\n"])
def test_bash_reads_words_that_cannot_be_printed_in_any_locale(word: str) -> None:
    plan = replace(
        plan_of("a", per_node=True, workdir="/"), command=("printf", "%s", word)
    )
    _, command = plan.dry_run().splitlines()
    assert command.isprintable()
    printed = subprocess.run(
        ["bash", "-c", command.partition("&& ")[2]],
        capture_output=True,
        check=True,
        env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
    )
    assert printed.stdout == os.fsencode(word)


def test_the_agent_starts_the_same_with_logs_and_its_own_address() -> None:
    plan = plan_of("a:2\nb:2")
    words = plan.agent_argv(1, {"log_dir": "/logs", "address": "10.0.0.2"}, 1234, [0])
    elastic = ["-m", "megatron_ext.tools.launch.elastic", "/logs/failure.json", "5"]
    assert words[:5] == ["/bin/python", *elastic]
    assert words[-3:] == ["-m", "megatron_ext", "train.py"]
    text = " ".join(words)
    assert "--node-rank 1" in text
    assert "--master-addr a --master-port 1234" in text
    assert (
        "--local-addr 10.0.0.2 --rdzv-id run --log-dir /logs/ranks --redirects 3 --tee 0:3"
        in text
    )


@pytest.mark.parametrize(
    ("flags", "replica"),
    [
        ("", 1),
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size=3", 6),
        ("--context-parallel-size 2 --pipeline-model-parallel-size 3", 6),
        (f"{TP2_PP3} --forward-backward-disaggregating", 12),
        (
            f"{TP2_PP3} --forward-backward-disaggregating --ignore-forward-tensor-parallel",
            9,
        ),
    ],
)
def test_the_ranks_of_a_replica(flags: str, replica: int) -> None:
    parallel = Parallel.of(flags.split())
    assert parallel.replica_size == replica
    assert parallel.data_parallel(4 * replica) == 4
    if replica > 1:
        with pytest.raises(LaunchError, match="cannot be divided into replicas"):
            parallel.data_parallel(4 * replica + 1)


def test_the_batch_follows_from_the_plan() -> None:
    flags = "train.py --micro-batch-size 2 --tensor-model-parallel-size 2"
    plan = plan_of("a:4\nb:4", flags, num_microbatches=8).completed()
    assert flag_value(plan.command, "--global-batch-size") == str(8 * 2 * 4)
    assert "DP 4; 64 samples per step" in plan.summary()
    with pytest.raises(LaunchError, match="both set"):
        plan.completed()


def test_flags_of_the_environment_count() -> None:
    env = {
        "MEGATRON_EXT_FLAGS": "--forward-backward-disaggregating --pipeline-transport tcp"
    }
    flags = "train.py --micro-batch-size 1 --pipeline-model-parallel-size 2"
    text = "a:2 addr=10.0.0.1\nb:2 addr=10.0.0.2"
    plan = plan_of(text, flags, env=env, num_microbatches=8).completed()
    assert flag_value(plan.command, "--global-batch-size") == "8", (
        "half of the ranks only forward"
    )
    assert plan.command[-3:] == ("--node-ips", "10.0.0.1", "10.0.0.2")
    assert "DP 1, separate forward and backward ranks" in plan.summary()


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ("--expert-model-parallel-size 2", 2),
        ("--pipeline-model-parallel-size 2 --expert-model-parallel-size 4", 8),
        (f"{TP2_PP3} --expert-model-parallel-size 2", 12),
        (
            f"{TP2_PP3} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
            6,
        ),
        (f"{PP4_BITPIPE} --expert-model-parallel-size 2", 4),
        ("--forward-backward-disaggregating --expert-model-parallel-size 2", 4),
    ],
)
def test_the_smallest_job_holds_all_experts(flags: str, ranks: int) -> None:
    assert Parallel.of(flags.split()).smallest_job == ranks


@pytest.mark.parametrize("wrong", ["0", "two", "-1", "\u0662"])
def test_sizes_that_are_no_numbers(wrong: str) -> None:
    with pytest.raises(
        LaunchError, match=r"--tensor-model-parallel-size=.* at least 1; remove it"
    ):
        Parallel.of(["--tensor-model-parallel-size", wrong])


@pytest.mark.parametrize(
    "flags",
    [
        *(f"--pipeline-transport {name}" for name in ("auto", "tcp", "rdma")),
        "--use-dpp",  # which implies auto
        "--forward-backward-disaggregating",
    ],
)
def test_a_transport_between_hosts_gets_their_addresses(flags: str) -> None:
    text = "a:1 addr=10.0.0.1 rdma=10.1.0.1\nb:1 addr=10.0.0.2"
    plan = plan_of(text, f"train.py {flags}")
    assert plan.completed().command[-3:] == (
        "--node-ips",
        "10.1.0.1",
        "10.0.0.2",
    )
    if "--forward" in flags:
        return  # three ranks are no such job
    uneven = plan_of(text.replace("a:1", "a:2"), f"train.py {flags}")
    assert replace(uneven, allow_uneven=True).completed().command[-4:] == (
        "--node-ips", "10.1.0.1", "10.1.0.1", "10.0.0.2",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("a:1\nb:1", ""),
        ("a:1\nb:1", "--pipeline-transport torch"),
        ("a:1\nb:1", "--pipeline-transport shm"),
        ("a:1", "--pipeline-transport tcp"),
        ("a:1\nb:1", "--pipeline-transport tcp --node-ips 1.2.3.4 1.2.3.5"),
    ],
)
def test_no_addresses_are_added_where_nobody_asked(text: str, flags: str) -> None:
    plan = plan_of(text, f"train.py {flags}")
    assert plan.completed().command == plan.command


def test_uneven_hosts_have_to_be_allowed() -> None:
    hosts = read(HOSTFILES / "mixed-slots.example")
    plan = replace(plan_of("a"), hosts=hosts)
    with pytest.raises(
        LaunchError, match=r"different numbers .*node1 8, node2 4.*--allow-uneven"
    ):
        plan.check()
    replace(plan, allow_uneven=True).check()
    assert (plan.world_size, plan.first_rank(1)) == (12, 8)
    assert plan.environment(1) == {"NCCL_DEBUG": "WARN"}
    assert "--master-addr 10.0.0.1" in plan.dry_run()


def test_numbers_of_devices_are_filled_in() -> None:
    hosts = read(HOSTFILES / "two-nodes.example")
    plan = replace(
        plan_of("a"), hosts=tuple(replace(host, slots=None) for host in hosts)
    )
    assert [host.slots for host in plan.completed([8, 8]).hosts] == [8, 8]
    with pytest.raises(LaunchError, match=r"10\.0\.0\.2: no devices were found there"):
        plan.completed([8, 0])


def test_localhost_among_others_needs_an_address() -> None:
    with pytest.raises(LaunchError, match="localhost: the other hosts cannot reach it"):
        plan_of("localhost:1\nb:1").check()
    plan_of("localhost:1 addr=10.0.0.1\nb:1").check()
    plan_of("localhost:1").check()


def test_values_of_variables_are_not_written_down() -> None:
    plan = plan_of("a:1", env={"HF_TOKEN": "secret"})
    assert plan.request(0)["env"] == {"HF_TOKEN": "secret"}
    assert "secret" not in str(plan.record())
    assert JobPlan.of_record(json.loads(json.dumps(plan.record()))).world_size == 1


def test_a_job_that_keeps_going_starts_its_reserve_and_restarts_in_its_processes() -> (
    None
):
    plan = plan_of(
        "localhost:2",
        "pretrain_gpt.py --pipeline-model-parallel-size 2 --inprocess-last-call-wait 3",
        reserve=1,
        log_root="/logs",
    ).completed()
    assert (plan.world_size, plan.num_started) == (2, 3)
    flags = plan.command
    assert flags.count("--inprocess-restart") == 1
    assert flag_value(flags, "--inprocess-active-world-size") == "2"
    assert flag_value(flags, "--inprocess-granularity") == "rank"
    assert flag_value(flags, "--inprocess-last-call-wait") == "3"  # the user's stays
    assert flag_value(flags, "--non-persistent-local-ckpt-dir") == "/logs/run/local"
    assert "2 ranks and 1 in reserve" in plan.summary()
    argv = plan.agent_argv(0, {"log_dir": "/logs/run/000-localhost"}, 1234, [0, 2])
    assert argv[1:7] == [
        "-m", "megatron_ext.tools.launch.keeper", "/logs/run/000-localhost/failure.json", "5", "1",
        "3",
    ]  # fmt: skip
    assert "--replication" not in flags  # a stand-in reads the files of the same disk
    assert argv[argv.index("--nproc-per-node") + 1] == "3"
    assert plan.host_of(2) == 0
    by_hand = plan.dry_run()
    assert "megatron_ext.tools.launch.keeper" in by_hand
    assert "torch.distributed.run" not in by_hand


def test_ranks_in_reserve_come_last_on_several_hosts() -> None:
    command = "pretrain_gpt.py --pipeline-model-parallel-size 2"
    beside = plan_of("a:2\nb:2", command, reserve=1).completed()
    assert (beside.world_size, beside.num_started, beside.num_in_reserve) == (4, 5, 1)
    assert [beside.first_rank(host) for host in range(3)] == [0, 2, 5]
    argv = beside.agent_argv(1, {"log_dir": "/logs", "address": "10.0.0.2"}, 1234, [])
    assert argv[5:7] == ["1", "2,3"]  # in reserve, on each host
    assert argv[argv.index("--nproc-per-node") + 1] == "3"
    assert argv[argv.index("--local-addr") + 1] == "10.0.0.2"
    apart = plan_of(
        "a:2\nb:2\nc:2", command, reserve=0, num_reserve_hosts=1
    ).completed()
    assert (apart.world_size, apart.num_started, apart.num_in_reserve) == (4, 6, 2)
    assert apart.host_of(5) == 2
    for rank in (-1, 6):
        with pytest.raises(LaunchError, match=f"rank {rank}: .* use 0 to 5"):
            apart.host_of(rank)
    for plan in (beside, apart):
        flags = plan.command
        assert flag_value(flags, "--inprocess-active-world-size") == "4"
        # Rank 0 saves the tensors of rank 2 too, which runs on the other host.
        assert "--replication" in flags
        assert flag_value(flags, "--replication-jump") == "2"
        assert flag_value(flags, "--replication-factor") == "2"
        # A rank that stands in on another host has the number of the lost one.
        assert "--node-ips" not in flags


def test_the_last_rank_is_shown_with_those_that_may_replace_it() -> None:
    plain = plan_of("a:2\nb:2").completed()
    assert shown_ranks("0,last", plain) == [0, 3]
    kept = plan_of("a:2\nb:2", "pretrain_gpt.py", reserve=2).completed()
    assert shown_ranks("0,last", kept) == [0, 3, 4, 5]
    assert shown_ranks("all", kept) == list(range(6))
    with pytest.raises(LaunchError, match="from 0 to 5"):
        shown_ranks("6", kept)


def test_three_hosts_save_three_copies_and_uneven_ones_none() -> None:
    command = "pretrain_gpt.py --pipeline-model-parallel-size 3"
    flags = plan_of("a:1\nb:1\nc:1", command, reserve=1).completed().command
    assert flag_value(flags, "--replication-factor") == "3"
    uneven = plan_of("a:1\nb:2", command, reserve=1, allow_uneven=True)
    with pytest.raises(
        LaunchError,
        match="requires the same number of processes on every training host",
    ):
        uneven.completed()
    assert "--replication" not in (
        replace(
            uneven, command=(*uneven.command, "--non-persistent-ckpt-type", "global")
        )
        .completed()
        .command
    )


def test_a_hang_time_out_bounds_how_long_a_rank_may_stand_still() -> None:
    command = "pretrain_gpt.py --pipeline-model-parallel-size 2 --hang-timeout 100 "
    command += "--non-persistent-ckpt-type global"
    flags = plan_of("localhost:2", command, reserve=1).completed().command
    assert flag_value(flags, "--inprocess-soft-timeout") == "100"
    assert flag_value(flags, "--inprocess-hard-timeout") == "150"
    assert flag_value(flags, "--inprocess-barrier-timeout") == "200"
    assert flag_value(flags, "--non-persistent-local-ckpt-dir") is None
