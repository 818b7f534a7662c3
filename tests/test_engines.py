"""Live ranks: what they are, how they are refused, interrupted and ended, and who can reach them."""

import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lab_common import LabError
from lab_utils import engines

LINUX = sys.platform.startswith("linux")
only_linux = pytest.mark.skipif(not LINUX, reason="NOT TESTED HERE: /proc")


def list_processes(folder: Path) -> list[int]:
    """All processes of one start, by the argument that they share."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def wait_until_gone(folder: Path, seconds: float = 15.0) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := list_processes(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@pytest.fixture(scope="module")
def ranks():
    yield engines.start(3, timeout=3)
    engines.stop()


def test_ranks_have_their_numbers_a_group_and_threads(ranks):
    assert ranks.view["rank"] == [0, 1, 2] and ranks.view["world_size"] == [3] * 3
    ranks.view.execute("x = torch.tensor([2.0**rank]); dist.all_reduce(x); found = x.item()")
    assert ranks.view["found"] == [7.0] * 3
    ranks.view.execute("found = torch.get_num_threads(), dist.get_backend(), os.getpid()")
    assert ranks.view["found"] == [(1, "gloo", pid) for pid in ranks.pids]


def test_a_collective_that_a_rank_does_not_call_ends_after_the_timeout(ranks):
    start = time.monotonic()
    call = ranks.view.execute("found = None\nif rank: dist.all_reduce(torch.ones(1))", block=False)
    with pytest.raises(Exception, match="Timed out"):
        call.get(timeout=30)
    assert 2.5 < time.monotonic() - start < 20
    assert ranks.view["rank"] == [0, 1, 2], "they answer again"


def test_an_interrupt_reaches_what_the_ranks_run(ranks):
    call = ranks.view.execute("import time\nfor _ in range(600): time.sleep(0.1)", block=False)
    time.sleep(0.5)
    ranks.client.send_signal(signal.SIGINT)  # as %%px does
    with pytest.raises(Exception, match="KeyboardInterrupt"):
        call.get(timeout=20)
    assert ranks.view["rank"] == [0, 1, 2]


@only_linux
def test_only_gloo_listens_and_on_the_loopback(ranks):
    inodes = {}
    for pid in list_processes(ranks.folder):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes[str(entry.readlink())] = pid
            except OSError:
                continue
    tables = (Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
    listening = [row.split() for table in tables for row in table.splitlines() if row.split()[3] == "0A"]
    ours = [(row[1], inodes[name]) for row in listening if (name := f"socket:[{row[9]}]") in inodes]
    assert {address.partition(":")[0] for address, _ in ours} == {"0100007F"}
    assert {pid for _, pid in ours} <= {*ranks.pids}


@only_linux
def test_no_other_user_can_enter_the_folder_of_their_sockets_and_key(ranks):
    assert stat.S_IMODE(ranks.folder.stat().st_mode) == 0o700
    assert list(ranks.folder.glob("s:*")) and (ranks.folder / "security" / "ipcontroller-client.json").is_file()


@only_linux
def test_a_second_start_stops_the_first_and_a_stop_leaves_nothing(ranks):
    first = ranks.folder
    second = engines.start(1)
    assert wait_until_gone(first) == [] and not first.exists()
    assert second.view["rank"] == [0] and list_processes(second.folder)
    engines.stop()
    assert wait_until_gone(second.folder) == [] and not second.folder.exists()
    with pytest.raises(LabError, match="No ranks are live"):
        engines.share(wait_until_gone)
    engines.stop()


@only_linux
def test_they_outlive_the_thread_that_started_them_and_not_their_supervisor():
    made = []
    thread = threading.Thread(target=lambda: made.append(engines.start(2)))
    thread.start()
    thread.join(120)
    time.sleep(0.5)
    assert made[0].view["rank"] == [0, 1]
    made[0].supervisor.kill()
    assert wait_until_gone(made[0].folder) == []
    engines.stop()


@only_linux
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_they_end_with_the_process_that_started_them(number, root):
    script = "import sys, time\nfrom lab_utils import engines\nmade = engines.start(2)\n"
    script += "made.view.execute('import time; time.sleep(300)', block=False)\n"  # busy, and not at a prompt
    script += "print(made.folder, flush=True); time.sleep(300)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=root, text=True) as kernel:
        folder = Path(kernel.stdout.readline().strip())
        assert len(list_processes(folder)) == 5  # supervisor, controller and its heartbeats, two ranks
        kernel.send_signal(number)
        assert wait_until_gone(folder) == []
    assert not folder.exists()
