"""Hosts on one machine: network namespaces with addresses and host names of their own, connected by a bridge.

    with Network(2) as network:
        network.run(0, ["ping", "-c", "1", "host1"])

Nothing is sent outside, since no namespace has a connection to the network of the machine. They have no names: each
lasts as long as a process in it, and the kernel ends these processes with the one that has made the network, however
that ends. So nothing is left behind, and networks of several programs never meet.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path

from hf_zero.parent import end_with_parent


PORT = 29500  # of the rendezvous: each network has all ports
_NAMESPACES = ("net", "uts", "mnt")
_UNSHARE = ("unshare", "--net", "--uts", "--mount", "--propagation", "private")


@cache
def missing() -> str | None:
    """Returns why this machine can have no networks; `None` where it can."""
    for program in ("unshare", "nsenter", "ip", "tc"):
        if shutil.which(program) is None:
            return f"there is no program {program!r}"
    tried = subprocess.run(
        [*_UNSHARE, "ip", "link", "add", "name", "one", "type", "veth"], capture_output=True, text=True
    )
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else None


class Host:
    """A host of a network. It can be pickled, and means the same while the network lasts.

    Args:
        name (`str`): the host name.
        address (`str`): of its network interface.
        pid (`int`): of the process that holds its namespaces.
    """

    interface = "eth0"

    def __init__(self, name: str, address: str, pid: int):
        self.name, self.address, self.pid = name, address, pid

    def enter(self) -> None:
        """Moves this process, which has one thread, into the host. It stays in its folder."""
        folder = os.getcwd()
        for kind in _NAMESPACES:
            descriptor = os.open(f"/proc/{self.pid}/ns/{kind}", os.O_RDONLY)
            if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0):
                raise OSError(ctypes.get_errno(), f"cannot enter the {kind} namespace of {self.name}")
            os.close(descriptor)
        os.chdir(folder)

    def command(self, argv: list[str]) -> list[str]:
        """Returns the command that runs `argv` in this host, in the folder of whoever runs it."""
        flags = [f"--{kind}" for kind in ("net", "uts", "mount")]
        return ["nsenter", f"--target={self.pid}", *flags, "env", f"--chdir={os.getcwd()}", *argv]

    def path(self, path: Path) -> Path:
        """Returns where the machine finds a file of this host."""
        return Path(f"/proc/{self.pid}/root") / path.relative_to("/")

    def kill_all(self) -> None:
        """Kills all processes of this host but the one that holds its namespaces."""
        own = os.readlink(f"/proc/{self.pid}/ns/net")
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended meanwhile
                if os.readlink(folder / "ns/net") == own and int(folder.name) != self.pid:
                    os.kill(int(folder.name), signal.SIGKILL)


class Network:
    """Hosts and the bridge that connects them. It is made when it is entered.

    Args:
        num_hosts (`int`): how many.
        name (`str`, *optional*): what all hosts are called; by default host0, host1 and so on. Under a common name
            they know one another by address alone.
        own_address (`str`, *optional*): what each host's name stands for on that host, instead of its address.
    """

    def __init__(self, num_hosts: int, *, name: str | None = None, own_address: str | None = None):
        self._own_address = own_address
        self._names = [name or f"host{index}" for index in range(num_hosts)]
        self.hosts: list[Host] = []
        self._stack = ExitStack()

    def __enter__(self) -> "Network":
        with ExitStack() as stack:
            table = Path(stack.enter_context(tempfile.TemporaryDirectory()), "hosts")
            lines = [f"{_address(index)} {name}\n" for index, name in enumerate(self._names)]
            bridge = _hold(stack, ["ip link add bridge type bridge", "ip link set bridge up"])
            for index, name in enumerate(self._names):
                # a host knows its own name first, should others have the same
                own = Path(f"{table}{index}")
                first = f"{self._own_address} {name}\n" if self._own_address else lines[index]
                own.write_text("127.0.0.1 localhost\n" + "".join([first, *lines]))
                pid = _hold(stack, [f"hostname {name}", f"mount --bind {own} /etc/hosts", "ip link set lo up"])
                self.hosts.append(Host(name, _address(index), pid))
                _connect(bridge, self.hosts[-1], index)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_) -> None:
        for host in self.hosts:
            host.kill_all()
        self._stack.close()

    def start(self, index: int, argv: list[str], **settings) -> subprocess.Popen:
        """Starts a program on a host, which is killed when the network ends."""
        settings = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **settings}
        begin = partial(end_with_parent, os.getpid())
        process = subprocess.Popen(
            self.hosts[index].command(argv), start_new_session=True, preexec_fn=begin, **settings
        )
        self._stack.callback(_kill, process)
        return process

    def run(self, index: int, argv: list[str]) -> str:
        """Runs a program on a host, and returns what it prints."""
        return _run(self.hosts[index].command(argv))

    @contextmanager
    def container(self, host: Host, hidden: Path) -> Iterator[Host]:
        """Makes a container on a host: it has the host's network, and a folder of its own in place of one."""
        with ExitStack() as stack:
            lines = [f"mount -t tmpfs none {hidden}"]
            pid = _hold(stack, lines, host.command(["unshare", "--mount", "--propagation", "private"]))
            yield Host(host.name, host.address, pid)

    def throttle(self, rate: str) -> None:
        """Limits what each host sends to a rate, such as `"200mbit"`."""
        for index, host in enumerate(self.hosts):
            limit = ["tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]
            self.run(index, ["tc", "qdisc", "replace", "dev", host.interface, "root", *limit])

    def torchrun(self, script: list[str], *, num_ranks: int) -> list[subprocess.Popen]:
        """Starts a script on all hosts by torch's launcher, as docs/multi-node.md says."""
        launcher = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(self.hosts)}"]
        launcher += [f"--nproc_per_node={num_ranks}", "--rdzv_backend=c10d", "--rdzv_id=run1"]
        launcher += [f"--rdzv_endpoint={self.hosts[0].address}:{PORT}"]
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
        env.pop("GLOO_SOCKET_IFNAME", None)
        return [self.start(index, [*launcher, *script], env=env) for index in range(len(self.hosts))]


def _address(index: int) -> str:
    return f"10.77.0.{index + 1}"


def _connect(bridge: int, host: Host, index: int) -> None:
    """Plugs a host's interface into the bridge."""
    port = f"port{index}"
    inside = ["nsenter", f"--target={bridge}", "--net"]
    ends = ["type", "veth", "peer", "name", host.interface, "netns", str(host.pid)]
    _run([*inside, "ip", "link", "add", port, *ends])
    _run([*inside, "ip", "link", "set", port, "master", "bridge", "up"])
    _run(host.command(["ip", "address", "add", f"{host.address}/24", "dev", host.interface]))
    _run(host.command(["ip", "link", "set", host.interface, "up"]))


def _hold(stack: ExitStack, lines: list[str], unshare: Sequence[str] = _UNSHARE) -> int:
    """Makes namespaces, runs shell commands in them, and returns the process that holds them until the stack
    ends."""
    script = "\n".join(["set -e", *lines, "echo ready", "exec sleep infinity"])
    process = subprocess.Popen(
        [*unshare, "sh", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=partial(end_with_parent, os.getpid()),
    )
    stack.callback(_kill, process)
    said = process.stdout.readline()
    if said != "ready\n":
        raise RuntimeError(f"no namespaces: {said}{process.communicate()[0]}")
    return process.pid


def _run(argv: list[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout


def _kill(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
