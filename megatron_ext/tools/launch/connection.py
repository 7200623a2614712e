"""The launcher's end of a connection to one agent."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.tools.launch import protocol

if TYPE_CHECKING:
    from megatron_ext.tools.launch.hostfile import Host
    from megatron_ext.tools.launch.ssh import Ssh

__all__ = ["Connection", "ConnectionLost", "agent_command"]

_NOISE_LINES = 20
_CLOSE_S = 5.0


class ConnectionLost(Exception):
    """The agent exited or never started; the message holds the last output."""


def agent_command(python: str) -> list[str]:
    """Return the command that runs an agent on a host with the same files as this one.

    If this package runs from a checkout, the agent comes from the same path if that exists.
    """
    root = Path(__file__).resolve().parents[3]
    variables = ["MEGATRON_EXT_DISABLE=1"]
    if "site-packages" not in root.parts and "dist-packages" not in root.parts:
        variables.append(f"PYTHONPATH={root}")
    return ["env", *variables, python, "-m", "megatron_ext.tools.launch.agent"]


class Connection:
    """A running agent: messages in both directions, and other output of its process.

    `open` creates it. One task reads, and another may write.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.noise: deque[str] = deque(maxlen=_NOISE_LINES)
        """The last lines other than messages: from ssh, login scripts, or errors of the agent."""
        self._stderr = asyncio.create_task(self._read_stderr())

    @classmethod
    async def open(cls, argv: Sequence[str]) -> Connection:
        """Start an agent, with the program that reaches it.

        Raises:
            ConnectionLost: The program cannot be started.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=protocol.MAX_LINE_BYTES,
                start_new_session=True,  # Ctrl-C goes to the launcher, which stops the agents
            )
        except OSError as error:
            raise ConnectionLost(f"{argv[0]} cannot be started: {error.strerror}") from None
        return cls(process)

    @classmethod
    async def to(cls, host: Host, *, local: bool, python: str, ssh: Ssh) -> Connection:
        """Start an agent on a host, without ssh if it is this one."""
        command = agent_command(python)
        return await cls.open(command if local else ssh.argv(host, command))

    @property
    def exit_code(self) -> int | None:
        """Exit code of the program that reaches the agent; None while it runs."""
        return self._process.returncode

    async def send(self, message: protocol.Message) -> None:
        """Send a message; if the agent has exited, `receive` reports it."""
        assert self._process.stdin is not None
        with suppress(ConnectionError):
            self._process.stdin.write(protocol.encode(message))
            await self._process.stdin.drain()

    async def receive(self) -> tuple[protocol.Message, bytes]:
        """Wait for the next message and the bytes that belong to it.

        Raises:
            ConnectionLost: The connection has ended.
        """
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
                message = protocol.decode(line)
                if message is not None:
                    size = message.get("bytes", 0)
                    return message, await self._process.stdout.readexactly(size)
            except (ValueError, asyncio.IncompleteReadError):
                line = b""  # not one of our agents, or it died during the write
            if not line:
                await self._ended()
                raise ConnectionLost(self.noise[-1] if self.noise else "the connection ended")
            self.noise.append(line.decode(errors="replace").rstrip())

    async def _ended(self) -> None:
        """Wait briefly for the exit code and the last output."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._process.wait(), _CLOSE_S)
            await asyncio.wait_for(asyncio.shield(self._stderr), _CLOSE_S)

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        with suppress(ValueError):  # a line of a megabyte
            async for line in self._process.stderr:
                self.noise.append(line.decode(errors="replace").rstrip())

    async def close(self, patience_s: float = _CLOSE_S) -> None:
        """End the connection, which ends the agent and its job if they still run.

        Args:
            patience_s: How long the program that reaches the agent may take before it is killed.
        """
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), patience_s)
        except asyncio.TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        self._stderr.cancel()
