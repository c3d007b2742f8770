"""A server that answers as the Hugging Face Hub does, as far as downloads and uploads need it."""

import base64
import hashlib
import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace


@contextmanager
def hub_stand_in():
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        server.hub = SimpleNamespace(  # type: ignore[attr-defined]
            url=f"http://127.0.0.1:{server.server_port}",
            repos={},  # "owner/name" or "datasets/owner/name" → (folder, commit of main); all have its files
            uploaded={},  # created repository → its files
            private=set(),  # created repositories that only their owner sees
        )
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server.hub  # type: ignore[attr-defined]
        finally:
            server.shutdown()
            thread.join(timeout=10)


OWNER = "me"  # token of a user of this name, who may write to repositories of their own


class _Answers(BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub, path = self.server.hub, self.path.partition("?")[0]  # type: ignore[attr-defined]
        if path.endswith("/auth-check/write"):
            return self._send(200 if self._may_write(path.split("/")[3]) else 403)
        verb, file = "resolve", ""
        if path.startswith(("/api/models/", "/api/datasets/")):
            kind, owner, name, *rest = path.removeprefix("/api/").split("/")
            repo = f"{owner}/{name}" if kind == "models" else f"{kind}/{owner}/{name}"
            verb, revision = rest[:2] or ("revision", "main")
        else:
            repo, _, place = path[1:].partition("/resolve/")
            revision, _, file = place.partition("/")
        if repo not in hub.repos:
            return self._send(404, {"X-Error-Code": "RepoNotFound"})
        folder, newest = hub.repos[repo]
        commit = newest if revision == "main" else revision
        if len(commit) != 40:
            return self._send(404, {"X-Error-Code": "RevisionNotFound"})
        if verb == "resolve":
            content = (folder / file).read_bytes()
            return self._send(200, {"X-Repo-Commit": commit, "ETag": f'"{_digest(content)}"'}, content)
        if verb != "tree":
            return self._answer({"id": repo.removeprefix("datasets/"), "sha": commit, "siblings": []})
        files = {str(found.relative_to(folder)): found for found in folder.rglob("*") if found.is_file()}
        contents = {name: found.read_bytes() for name, found in sorted(files.items())}
        return self._answer([
            {"type": "file", "oid": _digest(content), "size": len(content), "path": name}
            for name, content in contents.items()
        ])  # fmt: skip

    def do_POST(self):
        hub = self.server.hub  # type: ignore[attr-defined]
        lines = self.rfile.read(int(self.headers["Content-Length"])).splitlines()
        first, *rest = map(json.loads, lines)
        if self.path == "/api/repos/create":
            owner = first["organization"]
            repo = f"{owner}/{first['name']}"
            if not self._may_write(owner):
                return self._send(403, {"X-Error-Message": f"You may not create models of {owner}"})
            if first["visibility"] == "private" and repo not in hub.uploaded:
                hub.private.add(repo)
            hub.uploaded.setdefault(repo, {})
            return self._answer({"url": f"{hub.url}/{repo}"})
        owner, name, verb = self.path.split("/")[3:6]
        if verb == "preupload":
            regular = {"uploadMode": "regular", "shouldIgnore": False}
            return self._answer({"files": [regular | {"path": file["path"]} for file in first["files"]]})
        files = [entry["value"] for entry in rest]
        hub.uploaded[f"{owner}/{name}"] |= {file["path"]: base64.b64decode(file["content"]) for file in files}
        commit = "c" * 40
        return self._answer({"commitUrl": f"{hub.url}/{owner}/{name}/commit/{commit}", "commitOid": commit})

    def _may_write(self, owner):
        return owner == OWNER == self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _answer(self, found):
        self._send(200, {"Content-Type": "application/json"}, json.dumps(found).encode())

    def _send(self, status, headers=None, content=b""):
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


def _digest(content):
    return hashlib.sha1(content).hexdigest()
