"""What ranks agree on through a store: whoever comes first says it, and nothing waits for a store that is gone."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore

from gradtrace_recorder.launch.agreement import agreed

SERVER = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["tcp", "file", "hash"])
def test_first_proposal_is_everybodys(kind: str, tmp_path: Path) -> None:
    store: Store = {
        "tcp": lambda: TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
        "file": lambda: FileStore(str(tmp_path / "store"), 2),
        "hash": HashStore,
    }[kind]()
    one, other = PrefixStore("default_pg", store), PrefixStore("default_pg", store)
    assert agreed(one, "0/0", "mine") == "mine"
    assert agreed(other, "0/0", "yours") == "mine"
    assert agreed(other, "0/1", "yours") == "yours"  # the next start
    assert one.get("gradtrace/start/0/0") == b"mine"  # and nothing of the job's is called so


def test_store_whose_server_died_gives_no_answer_and_costs_no_time() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        client = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
        assert agreed(client, "0/0", "mine") == "mine"
        server.kill()
        server.wait()
        began = time.monotonic()
        assert agreed(client, "0/1", "mine") is None
        assert time.monotonic() - began < 4


def test_store_that_the_job_holds_is_waited_for_for_so_long_and_stays_usable() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", store.port)
    holder = threading.Thread(target=lambda: client.get("what comes late"))
    holder.start()
    time.sleep(0.2)
    began = time.monotonic()
    assert agreed(client, "0/0", "mine", seconds=0.3) is None
    assert 0.2 < time.monotonic() - began < 3
    store.set("what comes late", "here")
    holder.join(10)
    assert not holder.is_alive()
    # What was asked late is answered late: by what this rank went by, so nobody is led astray.
    client.set("job", "goes on")
    assert client.get("job") == b"goes on"
    assert agreed(store, "0/0", "yours") == "mine"


def test_store_that_cannot_compare_gives_no_answer() -> None:
    class Odd:
        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            raise NotImplementedError(key)

    assert agreed(Odd(), "0/0", "mine") is None
