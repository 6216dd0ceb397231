"""A hub in this process: takes repositories and commits, and remembers them."""

import base64
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeHub:
    """What a server of this kind was told.

    Attributes:
        requests: Method and path of each request, in order.
        repositories: What was asked to be created.
        files: The content of every file of the last commit, by path.
    """

    def __init__(self):
        self.requests, self.repositories, self.files = [], [], {}
        self.endpoint = ""

    def answer(self, method, path, body, token):
        self.requests.append(f"{method} {path}")
        if token != "Bearer secret":
            return 401, {"error": "no such token"}
        if path == "/api/whoami-v2":
            return 200, {"name": "me", "type": "user", "orgs": []}
        if path == "/api/repos/create":
            self.repositories.append(json.loads(body))
            return 200, {"url": f"{self.endpoint}/me/tiny"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.startswith("/api/models/me/tiny/preupload/"):
            asked = json.loads(body)["files"]
            return 200, {
                "files": [{"path": x["path"], "uploadMode": "regular", "shouldIgnore": False} for x in asked]
            }
        if path.startswith("/api/models/me/tiny/commit/"):
            return self._commit(body)
        if path.startswith("/api/models/me/tiny"):
            return 200, {"id": "me/tiny", "sha": "0" * 40, "siblings": []}
        return 404, {"error": path}

    def _commit(self, body):
        entries = [json.loads(line) for line in body.splitlines()]
        self.files = {
            entry["value"]["path"]: base64.b64decode(entry["value"]["content"])
            for entry in entries
            if entry["key"] == "file"
        }
        return 200, {"commitUrl": f"{self.endpoint}/me/tiny/commit/1", "commitOid": "1" * 40}


@contextmanager
def fake_hub():
    """A server on a port of its own while the block runs."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._reply("GET")

        def do_POST(self):
            self._reply("POST")

        def _reply(self, method):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, content = hub.answer(
                method, self.path.partition("?")[0], body, self.headers["Authorization"]
            )
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
