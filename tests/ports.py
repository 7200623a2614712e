"""Ports for jobs that tests start."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

PORTS = range(12000, 20000)
"""Linux gives outgoing connections the ports above 32767; `launch` takes those above 20000."""


def free_port(num_ports: int = 1) -> int:
    """Return the first of some free ports in a row.

    A port that the system chooses (port 0) may be given to another test's outgoing connection
    before the job listens, so choose one that the system never gives away.
    """
    for _ in range(1000):
        first = random.randrange(PORTS.start, PORTS.stop - num_ports)
        try:
            with ExitStack() as stack:
                for port in range(first, first + num_ports):
                    stack.enter_context(socket.create_server(("", port)))
        except OSError:
            continue
        return first
    raise OSError(f"no {num_ports} ports in a row are free in {PORTS}")
