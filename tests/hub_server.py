"""A small model hub on loopback: what huggingface_hub asks of one. Processes find it by `HF_ENDPOINT`."""

import hashlib
import http.server
import json
import pathlib
import re
import threading
import urllib.parse

MODEL = "org/model"


class HubServer(http.server.ThreadingHTTPServer):
    """Serves one model, `org/model`, from a folder, at `url` in a thread; `requests`: (method, path) of all that came.

    `refs`: {branch, tag or commit: commit}. `gated`: whether no file is given, as for want of a token.
    """

    daemon_threads, gated = True, False

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.folders, self.refs, self.requests = {}, {}, []
        self.move("main", folder)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def move(self, name, folder):
        """Let a branch or tag name a folder's files; returns the commit."""
        commit = hashlib.sha1(str(folder).encode()).hexdigest()
        self.folders[commit] = pathlib.Path(folder)
        self.refs |= {name: commit, commit: commit}
        return commit

    def stop(self):
        self.shutdown()
        self.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def dispatch(self):
        path = urllib.parse.unquote(self.path.partition("?")[0])
        self.server.requests.append((self.command, path))
        found = re.fullmatch(rf"(?:/api/models)?/{MODEL}(?:/(tree|revision|resolve)/([^/]+)/?(.*))?", path)
        commit = found and self.server.refs.get(found[2] or "main")
        if not commit:
            return self.answer(404, X_Error_Code="RevisionNotFound" if found else "RepoNotFound")
        folder = self.server.folders[commit]
        if found[1] == "resolve":
            file = folder / found[3]
            if self.server.gated:
                return self.answer(403, X_Error_Code="GatedRepo")
            if not file.is_file():
                return self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
            return self.answer(200, file.read_bytes(), X_Repo_Commit=commit, ETag=f'"{oid(file)}"')
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        tree = [
            {"type": "file", "path": str(file.relative_to(folder)), "size": file.stat().st_size, "oid": oid(file)}
            for file in files
        ]
        info = {"id": MODEL, "sha": commit, "siblings": [{"rfilename": entry["path"]} for entry in tree]}
        self.answer(200, json.dumps(tree if found[1] == "tree" else info).encode())

    do_GET = do_HEAD = dispatch

    def answer(self, code, body=b"", **headers):
        self.send_response(code)
        for name, value in {**headers, "Content_Length": str(len(body))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def oid(file):
    return hashlib.sha1(file.read_bytes()).hexdigest()
