"""Runs commands on hosts, by ssh or by Slurm's srun, and explains their failures.

The user's own ssh configuration, agent and jump hosts apply. ssh never prompts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_ext.tools.launch import slurm

if TYPE_CHECKING:
    from megatron_ext.tools.launch.hostfile import Host

CONNECTION_FAILED = 255
"""Exit code of ssh for its own failures, and for a remote command that a signal ended."""


@dataclass(frozen=True)
class Ssh:
    """How to run commands on hosts."""

    command: tuple[str, ...] = ("ssh",)
    """The ssh program, with the user's options (`--ssh-cmd`)."""
    connect_timeout_s: int = 10
    slurm_job: str | None = None
    """The job in whose allocation srun takes the place of ssh."""

    def argv(self, host: Host, remote: Sequence[str]) -> list[str]:
        """Return the command that runs `remote` on a host, its words quoted for the login shell."""
        if host.local:
            return list(remote)
        if self.slurm_job is not None:
            return slurm.argv(self.slurm_job, host, remote)
        options = [
            "BatchMode=yes", f"ConnectTimeout={self.connect_timeout_s}",
            "ServerAliveInterval=5", "ServerAliveCountMax=3",  # a dead host is noticed in 15 s
        ]  # fmt: skip
        words = [*self.command, "-T", *(word for each in options for word in ("-o", each))]
        words += [] if host.port is None else ["-p", str(host.port)]
        words += [] if host.user is None else ["-l", host.user]
        return [*words, host.name, shlex.join(remote)]


_MEANINGS = {
    r"Invalid job id|Unable to confirm allocation|Access/permission denied": "Slurm starts nothing "
    "for you in this job; it has ended or is somebody else's (squeue --me)",
    r"Permission denied": "ssh needs a password or a key that it does not have, and cannot ask; "
    "set one up (ssh-copy-id {host}) or load it (ssh-add)",
    r"Host key verification failed|authenticity of host": "ssh does not know its host key; log in "
    "once by hand to check and accept it (ssh {host})",
    r"Could not resolve hostname": "its name cannot be resolved; correct the hostfile, or give it "
    "an entry in ~/.ssh/config",
    r"Connection refused": "no ssh server answers there; start sshd, or give its port with port=N "
    "in the hostfile",
    r"timed out|No route to host|Network is unreachable": "it cannot be reached; check that it is "
    "up, or leave it out with --exclude {host}",
    r"No module named .?megatron_ext": "megatron_ext is not installed there; install it, or copy "
    "this tree to the same path with rsync",
    r"No such file or directory|not found": "the Python of this machine is not there; install it, "
    "or name another with --python PATH",
}
"""Pattern in the output of ssh or the login shell -> explanation and remedy."""


def explain(host: str, code: int | None, printed: Sequence[str]) -> str:
    """Explain in one line why an agent did not start on a host, with a remedy.

    `code` is the exit code of the connection, `printed` the lines of ssh or the login shell.
    """
    last = next((line.strip() for line in reversed(printed) if line.strip()), "no output")
    for pattern, meaning in _MEANINGS.items():
        if re.search(pattern, "\n".join(printed), re.IGNORECASE):
            return f"{meaning.format(host=host)} ({last})"
    return f"the agent did not start there (exit code {code}): {last}"
