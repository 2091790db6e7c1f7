"""Networks of namespaces: hosts reach one another and nobody else, and nothing is left however a test ends."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hosts.network import Network, missing


pytestmark = pytest.mark.skipif(missing() is not None, reason=f"{missing()}")

HOLDS = """
import time
from tests.hosts.network import Network
with Network(2) as network:
    print(*(host.pid for host in network.hosts), flush=True)
    time.sleep(100)
"""


@pytest.mark.quick
def test_hosts_have_names_and_reach_one_another_alone():
    with Network(2) as network:
        assert network.run(0, ["hostname"]) == "host0\n"
        assert network.run(1, ["getent", "hosts", "host0"]).split() == [network.hosts[0].address, "host0"]
        assert network.run(0, ["ip", "route"]).split()[0] == "10.77.0.0/24", "and no way outside"
        before = network.hosts[0].sent_nbytes()
        send = "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(bytes(1000), ('host1', 9))"
        network.run(0, [sys.executable, "-c", send])
        assert network.hosts[0].sent_nbytes() - before > 1000


def test_nothing_is_left_of_a_network_whose_maker_is_killed():
    maker = subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in maker.stdout.readline().split()]
    namespaces = {os.readlink(f"/proc/{pid}/ns/net") for pid in pids}
    assert len(namespaces) == 2
    maker.kill()
    maker.communicate()
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "the processes that hold the namespaces live on"
        time.sleep(0.02)
