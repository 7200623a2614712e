"""Boots one or two virtual machines with a software RDMA device (rxe).

QEMU emulates the processor, so neither hardware virtualisation nor root is needed. The guest sees
the host's files, read-only, so it runs the host's Python and this repository unchanged. The folder
/mnt is shared by the host and all guests.
"""

from __future__ import annotations

import gzip
import io
import lzma
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
# Read at import: tests move XDG_CACHE_HOME.
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
KERNEL = Path(
    os.environ.get("MEGATRON_EXT_VM_KERNEL") or _CACHE / "megatron_ext" / "vm-kernel"
)
_MODULES = (
    "virtio_pci", "virtio_net", "dummy", "crc32_generic", "ib_uverbs", "rdma_rxe",
    "9pnet_virtio", "9p", "sch_netem",
)  # fmt: skip
_PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "cpio": "cpio",
    "modprobe": "kmod",
    "rdma": "iproute2",
}
"""Required programs, each with its Debian package."""
_SEARCH_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


@dataclass(frozen=True)
class Guest:
    """Output of a virtual machine."""

    status: int | None
    """Exit status of its script; None if the script did not finish."""
    log: str
    """Output of the script."""
    console: str
    """Output of the kernel."""


def missing() -> str | None:
    """Return why no machine can be booted here, or None."""
    packages = [
        package
        for program, package in _PROGRAMS.items()
        if shutil.which(program, path=_SEARCH_PATH) is None
    ]
    if not list(Path("/usr/lib").glob("*/libibverbs/librxe-rdmav*.so")):
        packages.append("ibverbs-providers")
    if packages:
        return f"apt-get install {' '.join(packages)}"
    if not (KERNEL / "version").exists():
        return "tests/rdma_vm/fetch_kernel.sh unpacks a kernel"
    return None


def build_initrd(path: Path) -> None:
    """Write an initial file system: busybox, kernel modules, and guest_init.sh."""
    version = (KERNEL / "version").read_text().strip()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for folder in ("bin", "proc", "sys", "dev", "modules"):
            (root / folder).mkdir()
        shutil.copy(_program("busybox"), root / "bin" / "busybox")
        shutil.copy(HERE / "guest_init.sh", root / "init")
        (root / "init").chmod(0o755)
        names = []
        for module in _modules_in_order(version):
            names.append(module.name.removesuffix(".xz"))
            data = module.read_bytes()
            unpacked = lzma.decompress(data) if module.suffix == ".xz" else data
            (root / "modules" / names[-1]).write_bytes(unpacked)
        (root / "modules.list").write_text("".join(f"{name}\n" for name in names))
        files = "\n".join(
            str(file.relative_to(root)) for file in sorted(root.rglob("*"))
        )
        archive = subprocess.run(
            [_program("cpio"), "-o", "-H", "newc", "--quiet"],
            cwd=root, input=f".\n{files}\n".encode(), capture_output=True, check=True,
        )  # fmt: skip
    with (
        path.open("wb") as file,
        gzip.GzipFile(fileobj=file, mode="wb", compresslevel=1) as packed,
    ):
        shutil.copyfileobj(io.BytesIO(archive.stdout), packed)


def _modules_in_order(version: str) -> list[Path]:
    """Return the files of the modules, each after the modules that it needs."""
    files: dict[Path, None] = {}
    for module in _MODULES:
        listed = subprocess.run(
            [_program("modprobe"), "-S", version, "-d", str(KERNEL), "--show-depends", module],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        for line in listed.stdout.splitlines():
            if line.startswith("insmod "):
                files[Path(line.split()[1])] = None
    return list(files)


def boot(
    initrd: Path,
    share: Path,
    command: list[str],
    *,
    nodes: int,
    timeout_s: float,
    memory_mb: int = 1024,
    environment: dict[str, str] | None = None,
) -> list[Guest]:
    """Run a command in one machine, or in two that are connected by a virtual cable.

    Args:
        initrd: File written by `build_initrd`.
        share: An empty folder, which becomes /mnt in the guests.
        command: Command to run, with paths of the host. Its environment has NODE, 0 or 1; node n
            has the address 10.77.0.n+1 and the RDMA device rxe0.
        nodes: Number of machines, 1 or 2.
        timeout_s: Total time-out, after which machines are stopped.
        memory_mb: Memory of each machine.
        environment: Additional environment variables.
    """
    variables = {
        "HOME": "/root",
        "TMPDIR": "/dev/shm",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        **(environment or {}),
    }
    exports = [f"export {name}={shlex.quote(text)}" for name, text in variables.items()]
    lines = [*exports, "export NODE=$node", shlex.join(["cd", str(REPOSITORY)])]
    (share / "run.sh").write_text(
        "\n".join([*lines, f"exec {shlex.join(command)}", ""])
    )
    machines: list[subprocess.Popen[bytes]] = []
    cable = share / "cable"
    deadline = time.monotonic() + timeout_s
    try:
        for node in range(nodes):
            machines.append(_start(initrd, share, node, nodes, memory_mb))
            while nodes > 1 and not cable.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
        for machine in machines:
            machine.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass  # shown by the missing status
    finally:
        for machine in machines:
            machine.kill()
            machine.wait()
    return [_result(share, node) for node in range(nodes)]


def _start(
    initrd: Path, share: Path, node: int, nodes: int, memory_mb: int
) -> subprocess.Popen[bytes]:
    network = ["-nic", "none"]
    if nodes > 1:
        server = "on" if node == 0 else "off"
        cable = f"addr.type=unix,addr.path={share / 'cable'}"
        network = [
            "-netdev", f"stream,id=cable,server={server},{cable}",
            "-device", f"virtio-net-pci,netdev=cable,mac=52:54:00:00:00:0{node + 1}",
        ]  # fmt: skip
    command = [
        _program("qemu-system-x86_64"), "-accel", "tcg,thread=multi", "-cpu", "max",
        "-smp", "1",  # emulated processors that wait for each other starve on a busy host
        "-m", str(memory_mb), "-nographic", "-no-reboot",
        "-kernel", str(KERNEL / "vmlinuz"), "-initrd", str(initrd),
        # The kernel's timer check fails if the host is slow at the wrong moment.
        "-append", f"console=ttyS0 quiet panic=-1 no_timer_check node={node}",
        "-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap",
        "-virtfs", f"local,path={share},mount_tag=share,security_model=none",
        *network,
    ]  # fmt: skip
    with (share / f"console{node}").open("wb") as console:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT
        )


def _result(share: Path, node: int) -> Guest:
    def read(name: str) -> str:
        path = share / name
        return path.read_text(errors="replace") if path.exists() else ""

    status = read(f"node{node}.status").strip()
    return Guest(
        int(status) if status else None, read(f"node{node}.log"), read(f"console{node}")
    )


def _program(name: str) -> str:
    program = shutil.which(name, path=_SEARCH_PATH)
    assert program is not None, name
    return program
