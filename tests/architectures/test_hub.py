"""Hub ids: the cache, the pinned revision, and what is said when a repository cannot be had. Served by a local server."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from huggingface_hub import constants
from tiny_checkpoints import tiny

from halting_bench.architectures.hub import fetch, is_hub_id
from halting_bench.errors import UserError
from halting_bench.sources import find_model_source

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache that holds someone/loop at one commit, and a hub that is never asked."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "cache" / "models--someone--loop"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (repository / "blobs", repository / "refs", snapshot):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for number, file in enumerate(tiny(tmp_path / "plain", "ouro").iterdir()):
        file.rename(repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    return tmp_path


def test_a_cached_model_loads_offline_and_its_commit_is_written_down(cache):
    source = find_model_source("someone/loop")
    assert source.manifest() == {"model": "someone/loop", "revision": COMMIT, "class": None, "trust_remote_code": False}
    assert source.load(dtype=torch.float64).spec.family == "ouro"
    assert find_model_source(f"someone/loop@{COMMIT}").revision == COMMIT


def test_what_is_not_cached_is_explained_when_offline(cache):
    with pytest.raises(UserError, match="not in the hub's cache, and HF_HUB_OFFLINE is set") as caught:
        find_model_source("someone/else")
    assert "\n" not in str(caught.value)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Answers every request as the hub does for a repository of that name."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            status, code = {
                "gated": (403, "GatedRepo"),
                "old": (404, "RevisionNotFound"),
                "down": (500, ""),
            }.get(self.path.split("/")[4], (404, "RepoNotFound"))
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("someone/gated", "is gated: accept its terms .*hf auth login"),
        ("someone/missing", "no model someone/missing, or it is private"),
        ("someone/old@v0", "has no revision 'v0'"),
        ("someone/down", "could not be fetched"),
        ("someone/bad..name", "is not a hub id"),
    ],
)
def test_a_repository_that_cannot_be_had_is_explained(reference, message, hub):
    with pytest.raises(UserError, match=message) as caught:
        fetch(reference, endpoint=hub)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("reference", "expected"),
    [("a/b", True), ("a/b@main", True), ("a", False), ("a/b/c", False), ("../b", False), ("/a/b", False), ("a b/c", False)],
)
def test_hub_ids_are_told_from_paths(reference, expected):
    assert is_hub_id(reference) is expected
