"""A pretend Weights & Biases server on 127.0.0.1: names a key's owner, opens runs, and keeps the rows it receives."""

from __future__ import annotations

import base64
import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType


class WandbServer:
    """Serves until the ``with`` block ends.

    Args:
        accepts: True if it accepts keys.
        status: If it is not 200, every answer has this status and no content.

    Attributes:
        location: Target of its redirections, with a status such as 302.
        rows: The logged rows, by run.
        keys: Every key that it received.
        operations: The names of all GraphQL operations, in order.
    """

    def __init__(self, *, accepts: bool = True, status: int = 200) -> None:
        self.accepts, self.status = accepts, status
        self.location = ""
        self.rows: dict[str, list[dict]] = {}
        self.keys: set[str] = set()
        self.operations: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._make_handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> WandbServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, body: dict) -> dict:
        """Returns the server's answer to a POST."""
        if path.endswith("/file_stream"):
            lines = body.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            self.rows.setdefault(path.split("/")[-2], []).extend(map(json.loads, lines))
            return {}
        operation, values = body.get("operationName") or "", body.get("variables") or {}
        self.operations.append(operation)
        if operation == "UpsertBucket":
            project = {"id": "p", "name": values.get("project") or "p", "entity": {"id": "e", "name": "e"}}
            bucket = {"id": values.get("name"), "name": values.get("name"), "displayName": "", "config": "{}"}
            bucket |= {"sweepName": None, "historyLineCount": 0, "project": project}
            return {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/put"} for name in values["files"]]
            return {"data": {"createRunFiles": {"runID": values["run"], "uploadHeaders": [], "files": files}}}
        if operation and operation not in ("Viewer", "ArtifactType", "ServerFeatures"):
            return {"errors": [{"message": f"the pretend server has no {operation}"}]}
        viewer = {"id": "v", "username": "u", "entity": "e"} if self.accepts else None
        return {"data": {"viewer": viewer, "project": {"artifactType": None, "artifact": None}}}

    def _make_handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None: ...

            def _reply(self, content: dict) -> None:
                text = json.dumps(content).encode()
                self.send_response(server.status)
                self.send_header("Content-Length", str(len(text)))
                if server.location:
                    self.send_header("Location", server.location)
                self.end_headers()
                self.wfile.write(text)

            def _read(self) -> bytes:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

            def keep_key(self) -> None:
                kind, _, credentials = self.headers.get("Authorization", "").partition(" ")
                if kind == "Basic":
                    server.keys.add(base64.b64decode(credentials).decode().partition(":")[2])

            def do_GET(self) -> None:
                self.keep_key()
                self._reply({})

            def do_PUT(self) -> None:
                self._read()
                self._reply({})

            def do_POST(self) -> None:
                self.keep_key()
                self._reply(server.answer(self.path, json.loads(self._read() or "{}")))

        return Handler
