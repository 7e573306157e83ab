import hashlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from datamodules.loading.download import DownloadError, download
from tests.support.ranks import run_ranks

CONTENT = bytes(range(256)) * 4_000
MD5 = hashlib.md5(CONTENT).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    """What can go wrong, by name."""

    server: "_Server"

    def log_message(self, *values: object) -> None:
        pass

    def do_GET(self) -> None:
        name = self.path.split("/")[1]
        self.server.asked.append(name)
        if name == "garbage":
            self.wfile.write(b"no HTTP at all\r\n\r\n")
            return
        if name == "missing":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        sent = {"other": CONTENT[::-1], "truncated": CONTENT[:5_000], "stalled": CONTENT[:100_000]}.get(name, CONTENT)
        for start in range(0, len(sent), len(CONTENT) // 4):
            self.wfile.write(sent[start : start + len(CONTENT) // 4])
            self.wfile.flush()
            time.sleep(0.2 * (name == "slow"))
        if name == "stalled":
            self.server.over.wait(9)  # Less than the timeout that holds where none is given.


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[str] = []
        self.over = threading.Event()

    def address(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}/file.gz"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are part of the tests."""


@pytest.fixture
def server() -> Iterator[_Server]:
    server = _Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.over.set()
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_file_that_is_there_is_not_asked_for_again(server: _Server, tmp_path: Path):
    path = tmp_path / "file.gz"
    path.write_bytes(b"mine")
    download([server.address("good")], path, MD5)
    assert path.read_bytes() == b"mine"
    assert server.asked == []
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("other", f"its MD5 is [0-9a-f]{{32}}, expected {MD5}"),
        ("truncated", "it ended after 5,000 of 1,024,000 bytes"),
        ("stalled", "timed out"),
        ("garbage", "no HTTP at all"),
        ("missing", "HTTP Error 404: Not Found"),
    ],
)
def test_a_failure_names_the_host_with_the_reason(server, tmp_path, name, reason):
    with pytest.raises(DownloadError, match=rf"could not download file\.gz \(127\.0\.0\.1:\d+: .*({reason})"):
        download([server.address(name)], tmp_path / "file.gz", MD5, timeout=0.4)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_removes_only_the_folders_made_for_it(server: _Server, tmp_path: Path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(DownloadError):
        download([server.address("missing")], tmp_path / "mine" / "new" / "folder" / "file.gz", MD5)
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]


def test_the_second_mirror_is_used_when_the_first_fails(server: _Server, tmp_path: Path):
    path = tmp_path / "new" / "folder" / "file.gz"
    download([server.address("other"), server.address("good"), server.address("missing")], path, MD5)
    assert path.read_bytes() == CONTENT
    assert server.asked == ["other", "good"]
    assert list(path.parent.iterdir()) == [path]


def test_a_partial_file_of_a_killed_run_is_overwritten(server: _Server, tmp_path: Path):
    (tmp_path / ".file.gz.part").write_bytes(b"x" * 2 * len(CONTENT))
    (tmp_path / ".file.gz.lock").touch()
    download([server.address("good")], tmp_path / "file.gz", MD5)
    assert (tmp_path / "file.gz").read_bytes() == CONTENT
    assert list(tmp_path.iterdir()) == [tmp_path / "file.gz"]


def _download_here(url: str, path: str) -> bytes:
    download([url], Path(path), MD5)
    return Path(path).read_bytes()


def test_processes_that_ask_at_the_same_time_download_once(server: _Server, tmp_path: Path):
    path = tmp_path / "file.gz"
    assert run_ranks(_download_here, 3, server.address("slow"), str(path)) == [CONTENT] * 3
    assert server.asked == ["slow"]
    assert list(tmp_path.iterdir()) == [path]
