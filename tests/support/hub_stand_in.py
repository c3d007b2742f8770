"""A server that answers as the Hugging Face Hub does, as far as downloads and uploads need it."""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread


@dataclass
class StandIn:
    url: str
    folders: dict[str, Path] = field(default_factory=dict)
    """Repository → its files: "owner/name" of a model, "datasets/owner/name"."""
    commits: dict[str, str] = field(default_factory=dict)
    """Repository → the commit of its branch main; its other commits have the same files."""
    asked: list[str] = field(default_factory=list)
    uploaded: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Repository that was created → its files by name."""
    private: set[str] = field(default_factory=set)  # created repositories that only their owner sees

    def add(self, repo: str, folder: Path, commit: str = "a" * 40) -> None:
        self.folders[repo], self.commits[repo] = folder, commit


@contextmanager
def hub_stand_in() -> Iterator[StandIn]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        hub = StandIn(f"http://127.0.0.1:{server.server_port}")
        server.hub = hub  # type: ignore[attr-defined]
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join(timeout=10)


OWNER = "me"  # token of a user of this name, who may write to repositories of their own


class _Answers(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub: StandIn = self.server.hub  # type: ignore[attr-defined]
        path = self.path.partition("?")[0]
        hub.asked.append(f"{self.command} {path}")
        if path.endswith("/auth-check/write"):
            return self._send(200 if self._may_write(path.split("/")[3]) else 403)
        if path.startswith(("/api/models/", "/api/datasets/")):
            kind, owner, name, *rest = path.removeprefix("/api/").split("/")
            repo = f"{owner}/{name}" if kind == "models" else f"{kind}/{owner}/{name}"
            verb, revision = rest[:2] or ("revision", "main")
            file = ""
        else:
            repo, _, place = path[1:].partition("/resolve/")
            verb, (revision, _, file) = "resolve", place.partition("/")
        if repo not in hub.folders:
            return self._send(404, {"X-Error-Code": "RepoNotFound"})
        commit = hub.commits[repo] if revision == "main" else revision
        if len(commit) != 40:
            return self._send(404, {"X-Error-Code": "RevisionNotFound"})
        if verb == "resolve":
            return self._send(200, _headers(commit, hub.folders[repo] / file), hub.folders[repo] / file)
        files = sorted(found for found in hub.folders[repo].rglob("*") if found.is_file())
        if verb == "tree":
            body: object = [
                {"type": "file", "oid": _digest(found), "size": found.stat().st_size,
                 "path": str(found.relative_to(hub.folders[repo]))}
                for found in files
            ]  # fmt: skip
        else:
            body = {"id": repo.removeprefix("datasets/"), "sha": commit, "siblings": []}
        return self._send(200, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def do_POST(self) -> None:
        hub: StandIn = self.server.hub  # type: ignore[attr-defined]
        lines = self.rfile.read(int(self.headers["Content-Length"])).splitlines()
        first, *rest = map(json.loads, lines)
        if self.path == "/api/repos/create":
            repo = f"{first['organization']}/{first['name']}"
            if not self._may_write(first["organization"]):
                return self._send(
                    403, {"X-Error-Message": f"You may not create models of {first['organization']}"}
                )
            if first["visibility"] == "private" and repo not in hub.uploaded:
                hub.private.add(repo)
            hub.uploaded.setdefault(repo, {})
            body: object = {"url": f"{hub.url}/{repo}"}
        else:
            owner, name, verb = self.path.split("/")[3:6]
            if verb == "preupload":
                body = {"files": [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for file in first["files"]
                ]}  # fmt: skip
            else:
                files = [entry["value"] for entry in rest]
                hub.uploaded[f"{owner}/{name}"] |= {
                    file["path"]: base64.b64decode(file["content"]) for file in files
                }
                body = {"commitUrl": f"{hub.url}/{owner}/{name}/commit/{'c' * 40}", "commitOid": "c" * 40}
        return self._send(200, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def _may_write(self, owner: str) -> bool:
        return owner == OWNER == self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _send(self, status: int, headers: dict[str, str] | None = None, body: bytes | Path = b"") -> None:
        content = body.read_bytes() if isinstance(body, Path) else body
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Stay silent."""


def _headers(commit: str, file: Path) -> dict[str, str]:
    return {"X-Repo-Commit": commit, "ETag": f'"{_digest(file)}"'}


def _digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
