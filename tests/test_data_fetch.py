import contextlib
import fcntl
import hashlib
import http.server
import os
import signal
import threading
import time

import numpy as np
import pytest
from harness.drawn import assert_explains, list_all

from lab_common import LabError
from lab_utils import data

CONTENT = b"\x1f\x8b" + np.random.default_rng(0).bytes(400_000)
MD5 = hashlib.md5(CONTENT).hexdigest()
LOCK = ".CINIC-10.tar.gz.lock"
PAGE = b"<!doctype html><html><head><title>Please log in</title></head></html>"


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves CONTENT as the path says, and writes down what was asked for and how much was sent."""

    def do_GET(self):
        server, kind = self.server, self.path.split("/")[1]
        start = int((self.headers["Range"] or "bytes=0-")[6:-1]) if kind != "norange" else 0
        body = CONTENT
        if kind == "html":
            body = PAGE
        elif kind == "wrong":
            body = CONTENT[:-1] + b"?"
        stop = len(body)
        if server.cuts:
            stop = max(start, int(server.cuts.pop(0) * len(body)))
        if kind == "gone":
            self.send_error(404)
            server.seen.append((self.path, self.headers["Range"], 0))
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Type", "text/html" if kind == "html" else "application/gzip")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        server.seen.append((self.path, self.headers["Range"], stop - start))
        with contextlib.suppress(OSError):
            self.wfile.write(body[start:stop])
            self.wfile.flush()
            if kind == "stalls" and stop < len(body):
                server.over.wait(5)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.seen, server.cuts, server.over = [], [], threading.Event()
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join()


def fetch(server, folder, *kinds, **settings):
    urls = [f"http://127.0.0.1:{server.server_port}/{kind}/CINIC-10.tar.gz" for kind in kinds]
    return data.fetch_archive(folder, urls=urls, size=len(CONTENT), **({"md5": MD5, "timeout": 5} | settings))


def test_a_download_arrives_whole_and_only_once(server, tmp_path):
    path = fetch(server, tmp_path / "new", "good")
    assert path == tmp_path / "new" / "CINIC-10.tar.gz" and path.read_bytes() == CONTENT
    assert list_all(tmp_path / "new") == [LOCK, "CINIC-10.tar.gz"]
    assert fetch(server, tmp_path / "new", "good") == path
    assert len(server.seen) == 1


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.99])
def test_a_cut_download_resumes_the_next_time(server, tmp_path, fraction):
    server.cuts = [fraction]
    with pytest.raises(LabError) as caught:
        fetch(server, tmp_path, "good")
    kept = int(fraction * len(CONTENT))
    assert_explains(caught.value, "could not be downloaded", "/good/", f"{kept:,} bytes are kept", "import FILE.tar.gz")
    assert list_all(tmp_path) == [LOCK, "CINIC-10.tar.gz.part"]
    assert (tmp_path / "CINIC-10.tar.gz.part").read_bytes() == CONTENT[:kept]
    server.seen.clear()
    assert fetch(server, tmp_path, "good").read_bytes() == CONTENT
    assert server.seen == [("/good/CINIC-10.tar.gz", f"bytes={kept}-", len(CONTENT) - kept)]
    assert list_all(tmp_path) == [LOCK, "CINIC-10.tar.gz"]


def test_an_interrupted_download_gives_the_prompt_back_and_resumes_the_next_time(server, tmp_path):
    server.cuts, begun = [0.5], []

    def interrupt():
        begun.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(1.0, interrupt).start()  # while the server sends nothing for 5 s
    with pytest.raises(KeyboardInterrupt):
        fetch(server, tmp_path, "stalls", timeout=30)
    assert time.monotonic() - begun[0] < 3
    assert list_all(tmp_path) == [LOCK, "CINIC-10.tar.gz.part"]
    kept = (tmp_path / "CINIC-10.tar.gz.part").stat().st_size
    assert kept > len(CONTENT) // 4
    assert fetch(server, tmp_path, "good").read_bytes() == CONTENT
    assert server.seen[-1][1] == f"bytes={kept}-"


def test_a_server_without_range_starts_over_cleanly(server, tmp_path):
    server.cuts = [0.5]
    assert fetch(server, tmp_path, "norange", "norange").read_bytes() == CONTENT
    assert [sent for _, _, sent in server.seen] == [len(CONTENT) // 2, len(CONTENT)]


@pytest.mark.parametrize("start", [b"", CONTENT[:1000]])
def test_a_wrong_checksum_moves_nothing_into_place(server, tmp_path, start):
    (tmp_path / "CINIC-10.tar.gz.part").write_bytes(start)
    with pytest.raises(LabError) as caught:
        fetch(server, tmp_path, "wrong")
    assert_explains(caught.value, "wrong checksum", MD5, "was removed", "/wrong/")
    assert list_all(tmp_path) == [LOCK]


def test_after_a_wrong_checksum_the_next_address_has_its_turn(server, tmp_path):
    (tmp_path / "CINIC-10.tar.gz.part").write_bytes(CONTENT + b"more")  # too long to become right
    assert fetch(server, tmp_path, "gone", "wrong", "good").read_bytes() == CONTENT


@pytest.mark.parametrize("start", [b"", CONTENT[:1000]])
def test_a_web_page_instead_of_the_archive_is_recognised(server, tmp_path, start):
    (tmp_path / "CINIC-10.tar.gz.part").write_bytes(start)
    with pytest.raises(LabError) as caught:
        fetch(server, tmp_path, "html")
    assert_explains(caught.value, "web page" if not start else "", "/html/", "import FILE.tar.gz")
    # What had arrived from a better address is not lost.
    assert list_all(tmp_path) == [LOCK, *(["CINIC-10.tar.gz.part"] if start else [])]
    assert fetch(server, tmp_path, "html", "good").read_bytes() == CONTENT


def test_all_addresses_dead_are_all_named(server, tmp_path):
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as closed:
        dead = f"http://127.0.0.1:{closed.server_port}/dead"
    gone = f"http://127.0.0.1:{server.server_port}/gone/file"
    with pytest.raises(LabError) as caught:
        data.fetch_archive(tmp_path, urls=[dead, gone], size=len(CONTENT), md5=MD5, timeout=5)
    assert_explains(
        caught.value, "any of 2 addresses", f"{dead}: ", "refused", f"{gone}: ", "404", "import FILE.tar.gz"
    )
    assert list_all(tmp_path) == [LOCK]


def test_a_download_waits_for_another_one_and_finds_its_file(server, tmp_path):
    with (tmp_path / LOCK).open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        waiting = threading.Thread(target=fetch, args=(server, tmp_path, "good"))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive() and server.seen == []
        (tmp_path / "CINIC-10.tar.gz").write_bytes(CONTENT)
    waiting.join(5)
    assert not waiting.is_alive() and server.seen == []
