"""Runs in one virtual machine: the probe, and two to eight processes over its RDMA device.

Writes the results to /mnt/results.json, for the tests on the host to judge.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

ADDRESS = "10.77.0.1"
PEER = Path(__file__).with_name("peer.py")
PROBE = f"""
import json, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import witness
from megatron_ext.transport.native import probe_rdma
result = probe_rdma(*sys.argv[1:])
print(json.dumps([result.usable, result.why_not or result.finding, witness.differences()]))
"""
# A root without capabilities, which may lock only little memory.
WEAK_ROOT = [
    "setpriv",
    "--bounding-set=-all",
    "--inh-caps=-all",
    "prlimit",
    "--memlock=65536",
]


def probe(*arguments: str, prefix: list[str] | None = None) -> object:
    command = [*(prefix or []), sys.executable, "-c", PROBE, *arguments]
    return json.loads(
        subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=60).stdout
    )


def start(role: str, rank: int, port: int, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PEER), role, str(rank), ADDRESS, str(port), *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def end(process: subprocess.Popen[str]) -> dict[str, object]:
    out, errors = process.communicate(timeout=180)
    if process.returncode != 0:
        return {"status": process.returncode, "errors": errors[-2000:]}
    return json.loads(out)


def exchange(port: int, num_ranks: int, num_messages: int) -> list[dict[str, object]]:
    """Let each rank send this many messages to every other rank."""
    counts = str(num_messages), str(num_ranks)
    processes = [start("messages", rank, port, *counts) for rank in range(num_ranks)]
    return [end(process) for process in processes]


def kill(victim: str, port: int) -> dict[str, object]:
    """Kill one of two processes in the middle of a stream; return the other's report."""
    processes = {"receive": start("receive", 0, port), "send": start("send", 1, port)}
    [survivor] = [process for name, process in processes.items() if name != victim]
    for line in survivor.stderr:
        if "streams" in line:
            break
    time.sleep(0.3)
    processes[victim].kill()
    processes[victim].wait()
    begin = time.monotonic()
    told = end(survivor)
    return {**told, "ended_s": time.monotonic() - begin}


def main() -> None:
    results = {
        "probe": probe(),
        "probe of another address": probe("10.99.0.1"),
        "probe without lockable memory": probe(prefix=WEAK_ROOT),
        "receiver killed": kill("receive", 4002),
        "sender killed": kill("send", 4003),
        "messages": [
            *exchange(4100, 2, 2500),
            *exchange(4200, 4, 175),
            *exchange(4300, 8, 55),
        ],
    }
    subprocess.run(["ip", "link", "set", "dummy0", "down"], check=True)
    results["probe without a link"] = probe()
    Path("/mnt/results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
