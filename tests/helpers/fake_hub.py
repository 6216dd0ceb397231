"""A hub in this process: repositories to download."""

import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import datasets.config
import huggingface_hub.constants
import huggingface_hub.hf_api

API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+))?(?:/.*)?")
FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    """What can be downloaded.

    Attributes:
        commits: The content of every file by path, by commit; the last one is `main`.
        names: Commits by branch or tag.
        gated: Whether it takes a token that was let in.
        cut: Files of which only the first half is sent.
    """

    commits: dict[str, dict[str, bytes]]
    names: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    cut: set[str] = field(default_factory=set)

    def commit(self, revision):
        found = self.names.get(revision, list(self.commits)[-1] if revision == "main" else revision)
        return found if found in self.commits else None


def commit_of(*folders: Path) -> dict[str, dict[str, bytes]]:
    """The files of folders as the commits of a repository, oldest first."""
    found = {}
    for number, folder in enumerate(folders, 1):
        files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        found[f"{number:040x}"] = {name: path.read_bytes() for name, path in files.items()}
    return found


class FakeHub:
    """What a server of this kind holds and was told.

    Attributes:
        holds: Repositories to download, by `models/owner/name` or `datasets/owner/name`.
        requests: Method and path of each request, in order.
    """

    def __init__(self):
        self.holds: dict[str, Repository] = {}
        self.requests = []
        self.endpoint = ""

    def answer(self, method, path, body, token):
        """Status, content (bytes, or anything as JSON) and headers."""
        if path != "/api/agent-harnesses":  # which the client asks once a process, whatever for
            self.requests.append(f"{method} {path}")
        for pattern, reply in ((FILE, self._file), (API, self._about)):
            if (match := pattern.fullmatch(path)) and (found := reply(*match.groups(), body, token)):
                return found
        return 404, {"error": path}, {}

    def _file(self, dataset, name, revision, path, _body, token):
        repository = self.holds.get(f"{'datasets' if dataset else 'models'}/{name}")
        if refused := self._refused(repository, revision, token, of_files=True):
            return refused
        commit = repository.commit(revision)
        content = repository.commits[commit].get(path)
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if content is None:
            return 404, b"", headers | {"X-Error-Code": "EntryNotFound"}
        headers |= {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Linked-Size": str(len(content))}
        return 200, content[: len(content) // 2] if path in repository.cut else content, headers

    def _about(self, kind, name, what, revision, body, token):
        repository = self.holds.get(f"{kind}/{name}")
        if refused := self._refused(repository, revision or "main", token):
            return refused
        commit = repository.commit(revision or "main")
        files = repository.commits[commit]
        listed = [
            {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for path, content in files.items()
        ]
        if what == "tree":
            return 200, listed, {}
        if what == "paths-info":
            asked = re.findall(r"paths=([^&]*)", body.decode())
            return 200, [entry for entry in listed if entry["path"] in asked], {}
        siblings = [{"rfilename": path} for path in files]
        return 200, {"id": name, "sha": commit, "siblings": siblings, "private": False, "tags": []}, {}

    def _refused(self, repository, revision, token, of_files=False):
        if repository is None:
            return 401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        if repository.gated and token != "Bearer secret" and of_files:
            return (403 if token else 401), {"error": "Access is restricted."}, {"X-Error-Code": "GatedRepo"}
        if repository.commit(revision) is None:
            return 404, {"error": f"Invalid rev id: {revision}"}, {"X-Error-Code": "RevisionNotFound"}
        return None


def _handler(hub):
    class Handler(BaseHTTPRequestHandler):
        def reply(self):
            body, path = (
                self.rfile.read(int(self.headers.get("Content-Length", 0))),
                self.path.partition("?")[0],
            )
            status, content, headers = hub.answer(self.command, path, body, self.headers["Authorization"])
            if not isinstance(content, bytes):
                content = json.dumps(content).encode()
                headers |= {"Content-Type": "application/json"}
            if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                first, last = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
                headers |= {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
                status, content = 206, content[first : last + 1]
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_POST = do_HEAD = reply  # noqa: N815

        def log_message(self, *_):
            pass

    return Handler


@contextmanager
def fake_hub():
    """A server on a port of its own while the block runs."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def reach(monkeypatch, hub, cache: Path) -> None:
    """Have the libraries go to a hub, with nobody logged in and nothing fetched before.

    They read the environment when they are imported, so it is their constants that are set.
    """
    constants = {
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "ENDPOINT": hub.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(cache),
        "HF_TOKEN_PATH": "none",
    }
    for name, value in constants.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setattr(datasets.config, name, False)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.endpoint)
    # Clients that are made once and kept.
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", hub.endpoint)
    monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
