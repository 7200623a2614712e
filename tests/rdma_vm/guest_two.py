"""Runs between two virtual machines: messages, lost packets, and a disconnected cable.

It runs on both; the results of node N are in /mnt/resultsN.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

NODE = int(os.environ["NODE"])
ADDRESS = "10.77.0.1"  # of node 0
PEER = Path(__file__).with_name("peer.py")


def run(role: str, port: int, *, unplug: bool = False) -> dict[str, object]:
    process = subprocess.Popen(
        [sys.executable, str(PEER), role, str(NODE), ADDRESS, str(port)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    if unplug:
        for line in process.stderr:
            if "streams" in line:
                break
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
    begin = time.monotonic()
    out, errors = process.communicate(timeout=90)
    if process.returncode != 0:
        return {"status": process.returncode, "errors": errors[-2000:]}
    return {**json.loads(out), "ended_s": time.monotonic() - begin}


def meet(name: str) -> None:
    """Wait until the other node has reached the same point."""
    Path(f"/mnt/{name}.{NODE}").touch()
    deadline = time.monotonic() + 60
    while not Path(f"/mnt/{name}.{1 - NODE}").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the other node never came to {name}")
        time.sleep(0.05)


def main() -> None:
    results = {}
    meet("messages")
    results["messages"] = run("messages", 4001)
    subprocess.run(
        ["tc", "qdisc", "replace", "dev", "eth0", "root", "netem", "loss", "1%"],
        check=True,
    )
    meet("loss")
    results["loss"] = run("messages", 4002)
    lost = subprocess.run(
        ["tc", "-s", "-j", "qdisc", "show", "dev", "eth0"],
        capture_output=True,
        check=True,
    )
    results["packets lost"] = sum(
        item.get("drops", 0) for item in json.loads(lost.stdout)
    )
    subprocess.run(["tc", "qdisc", "del", "dev", "eth0", "root"], check=True)
    meet("no cable")
    results["no cable"] = run(
        "receive" if NODE == 0 else "send", 4003, unplug=NODE == 0
    )
    Path(f"/mnt/results{NODE}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
