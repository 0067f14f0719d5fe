"""A Hub on this machine, and scripts that know no other."""

import base64
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub as loading and pushing need, over the folders of `root`."""

    root: Path
    commit = "0123456789abcdef0123456789abcdef01234567"

    def do_HEAD(self):
        self.answer_file(with_body=False)

    def do_GET(self):
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:2] != ["api", "models"]:
            return self.answer_file(with_body=True)
        if (folder := self.repo(*parts[2:4])) is not None:
            siblings = [{"rfilename": file.name} for file in folder.iterdir()]
            self.answer(200, {"id": "/".join(parts[2:4]), "sha": self.commit, "siblings": siblings, "private": False})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[-2:] == ["repos", "create"]:
            wanted = json.loads(body)
            name = f"{wanted.get('organization') or 'someone'}/{wanted['name']}"
            if not (self.root / name).parent.is_dir():
                return self.answer(403, {"error": "You have no rights here"})
            exists = (self.root / name).is_dir()
            (self.root / name).mkdir(exist_ok=True)
            self.answer(409 if exists else 200, {"url": f"{self.address}/{name}", "name": name})
        elif "branch" in parts:
            self.answer(200, {})
        elif parts[-1] == "validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        elif "preupload" in parts:
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            self.answer(200, {"files": [{**file, "shouldIgnore": False} for file in files]})
        elif "commit" in parts:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    file = self.root / "/".join(parts[2:4]) / line["value"]["path"]
                    file.write_bytes(base64.b64decode(line["value"]["content"]))
            url = "/".join([self.address, *parts[2:4], "commit", self.commit])
            self.answer(200, {"commitUrl": url, "commitOid": self.commit, "success": True})
        else:
            self.answer(404, {})

    @property
    def address(self):
        return f"http://{self.headers['Host']}"

    def repo(self, owner, name):
        if owner == "private":
            return self.answer(401, {"error": "Repository not found"}, **{"X-Error-Code": "RepoNotFound"})
        if owner == "gated":
            return self.answer(403, {"error": "Gated"}, **{"X-Error-Code": "GatedRepo"})
        if (folder := self.root / owner / name).is_dir():
            return folder
        return self.answer(404, {"error": "Repository not found"}, **{"X-Error-Code": "RepoNotFound"})

    def answer_file(self, with_body):
        owner, name, _, _, filename = self.path.split("?")[0].strip("/").split("/")
        if (folder := self.repo(owner, name)) is None:
            return
        if not (file := folder / filename).is_file():
            return self.answer(404, {"error": "Entry not found"}, **{"X-Error-Code": "EntryNotFound"})
        self.answer(200, file.read_bytes(), with_body, **{"X-Repo-Commit": self.commit, "ETag": f'"{filename}"'})

    def answer(self, status, body, with_body=True, **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(data), "Content-Type": "application/json", **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if with_body and self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *args):
        pass


@contextmanager
def running_hub(folder):
    """A Hub over the folders of `folder / "hub"`; gives the environment of programs that know no other."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("TinyHub", (Hub,), {"root": folder / "hub"}))
    Thread(target=server.serve_forever, daemon=True).start()
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_", "PYTHONPATH"))
    }
    environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "NO_PROXY": "127.0.0.1"}
    environment |= {"HF_HOME": str(folder / "home"), "HF_HUB_CACHE": str(folder / "cache")}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    try:
        yield environment
    finally:
        server.shutdown()
        server.server_close()


def run_beside_a_hub(script, folder, *arguments):
    """Run a script in a folder, with the Hub of [`running_hub`]."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    with running_hub(folder) as environment:
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
