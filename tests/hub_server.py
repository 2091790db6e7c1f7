"""A hub of one process, which speaks to the real `huggingface_hub` client over loopback.

Repositories live in memory, as commits of files, which are uploaded within the commit: how large files go is the
client's business. A switch breaks it on purpose.
"""

import base64
import hashlib
import json
import re
import socket
import struct
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


REPO = r"(?P<repo>[^/]+/[^/]+)"


@dataclass(frozen=True)
class Blob:
    """A file's content, by its git hash."""

    content: bytes

    @property
    def oid(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()


@dataclass
class Repo:
    """Commits by hash, each all of its files; branches are names of commits."""

    private: bool
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, Blob], message: str) -> str:
        oid = hashlib.sha1(f"{len(self.commits)} {message}".encode()).hexdigest()
        self.commits[oid], self.branches[branch] = files, oid
        self.messages.append(message)
        return oid

    def find(self, revision: str) -> str | None:
        oid = self.branches.get(revision, revision)
        return oid if oid in self.commits else None

    def files(self, revision: str = "main") -> dict[str, Blob]:
        return self.commits[self.branches[revision]]


def described(path: str, blob: Blob) -> dict:
    """A file as a listing has it."""
    return {"type": "file", "path": path, "oid": blob.oid, "size": len(blob.content)}


class HubServer:
    """Use it as a context manager; `url` is for `HF_ENDPOINT`.

    Args:
        tokens (`dict[str, str]`): user name by token.
    """

    def __init__(self, tokens: dict[str, str]):
        self.tokens = tokens
        self.lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Forgets everything but the tokens."""
        self.repos: dict[str, Repo] = {}
        self.requests: list[tuple[str, str]] = []
        # How many more times the connection breaks in the middle of a kind of request.
        self.drops: Counter[str] = Counter()

    def __enter__(self) -> "HubServer":
        handler = type("BoundHandler", (Handler,), {"hub": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def drop(self, kind: str) -> bool:
        """Whether this request is to fail, counted down."""
        with self.lock:
            if self.drops[kind] <= 0:
                return False
            self.drops[kind] -= 1
            return True


class Handler(BaseHTTPRequestHandler):
    """One connection. A route is (method, pattern, kind of request for the faults, who may, what to do)."""

    hub: HubServer
    protocol_version = "HTTP/1.1"
    timeout = 60

    def _handle(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        for method, pattern, kind, needs_token, act in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and method == self.command:
                if self.hub.drop(kind):
                    return self._drop()
                body = self._body()
                if self._refuses(needs_token):
                    return None
                return act(self, body=body, **match.groupdict())
        self._body()
        return self._json({"error": f"no route for {self.command} {path}"}, 404)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _handle

    def log_message(self, *_: object) -> None:
        pass

    # Bodies and answers

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _drop(self) -> None:
        """Takes some of the body, then breaks the connection so that the client sees a reset."""
        self.rfile.read(min(100, int(self.headers.get("Content-Length") or 1)))
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def _send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, content, status: int = 200, **headers: str) -> None:
        if status >= 400:
            headers.setdefault("X_Error_Message", content["error"])
        self._send(status, json.dumps(content).encode(), Content_Type="application/json", **headers)

    # Who asks

    @property
    def user(self) -> str | None:
        return self.hub.tokens.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

    def _refuses(self, needs_token: bool) -> bool:
        """A token that is wrong is refused even where none is needed, as on a real hub."""
        given = "Authorization" in self.headers
        if self.user is None and (needs_token or given):
            self._json({"error": "Invalid credentials in Authorization header"}, 401)
            return True
        return False

    def _repo(self, name: str, *, write: bool = False) -> Repo | None:
        """The repository, unless an answer has been given: there is none, or not for this user."""
        repo, is_owner = self.hub.repos.get(name), self.user == name.split("/")[0]
        if repo is None or (repo.private and not is_owner):
            self._json({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        elif write and not is_owner:
            self._json({"error": "You don't have write access"}, 403)
        else:
            return repo
        return None

    def _commit(self, repo: Repo, revision: str) -> str | None:
        oid = repo.find(revision)
        if oid is None:
            self._json({"error": f"Invalid rev id: {revision}"}, 404, X_Error_Code="RevisionNotFound")
        return oid

    # Repositories

    def whoami(self, body: bytes) -> None:
        self._json({"type": "user", "name": self.user, "orgs": [], "auth": {"type": "access_token"}})

    def validate_yaml(self, body: bytes) -> None:
        content = json.loads(body)["content"]
        if re.match(r"---\n.*?\n---\n", content, re.DOTALL):
            self._json({"errors": [], "warnings": []})
        else:
            self._json({"errors": [{"message": "no metadata"}], "warnings": [], "error": "invalid"}, 400)

    def create(self, body: bytes) -> None:
        wanted = json.loads(body)
        owner = wanted.get("organization") or self.user
        name = f"{owner}/{wanted['name']}"
        if owner != self.user:
            return self._json({"error": f"You don't have the right to create {name}"}, 403)
        with self.hub.lock:
            exists = name in self.hub.repos
            if not exists:
                private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
                repo = self.hub.repos[name] = Repo(private)
                repo.commit("main", {}, "initial commit")
        answer = {"url": f"{self.hub.url}/{name}", "name": name}
        if exists:
            return self._json({**answer, "error": "You already created this model repo"}, 409)
        return self._json(answer)

    def branch(self, body: bytes, repo: str, revision: str) -> None:
        if (found := self._repo(repo, write=True)) is None:
            return None
        if revision in found.branches:
            return self._json({"error": "Reference already exists"}, 409)
        found.branches[revision] = found.branches["main"]
        return self._json({})

    def info(self, body: bytes, repo: str, revision: str | None = None) -> None:
        if (found := self._repo(repo)) and (oid := self._commit(found, revision or "main")):
            self._json(
                {
                    "_id": "0",
                    "id": repo,
                    "modelId": repo,
                    "sha": oid,
                    "private": found.private,
                    "tags": [],
                    "downloads": 0,
                    "likes": 0,
                    "siblings": [{"rfilename": path} for path in found.commits[oid]],
                }
            )

    def tree(self, body: bytes, repo: str, revision: str, path: str | None = None) -> None:
        if (found := self._repo(repo)) is None or (oid := self._commit(found, revision)) is None:
            return None
        prefix = f"{path.strip('/')}/" if path else ""
        entries = [
            described(name, blob) for name, blob in sorted(found.commits[oid].items()) if name.startswith(prefix)
        ]
        if path and not entries:
            return self._json({"error": f"{path} does not exist"}, 404, X_Error_Code="EntryNotFound")
        return self._json(entries)

    # Uploading

    def preupload(self, body: bytes, repo: str, revision: str) -> None:
        if (found := self._repo(repo, write=True)) is None or (oid := self._commit(found, revision)) is None:
            return
        known = found.commits[oid]
        answers = []
        for file in json.loads(body)["files"]:
            remote = known[file["path"]].oid if file["path"] in known else None
            answers.append({"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": remote})
        self._json({"files": answers})

    def commit(self, body: bytes, repo: str, revision: str) -> None:
        if (found := self._repo(repo, write=True)) is None or (parent := self._commit(found, revision)) is None:
            return None
        lines = [json.loads(line) for line in body.splitlines() if line]
        with self.hub.lock:
            files = dict(found.commits[parent])
            for line in lines[1:]:
                _apply(files, line["key"], line["value"])
            oid = found.commit(revision, files, lines[0]["value"]["summary"])
        url = f"{self.hub.url}/{repo}/commit/{oid}"
        return self._json({"success": True, "commitOid": oid, "commitUrl": url, "pullRequestUrl": None})

    # Downloading

    def resolve(self, body: bytes, repo: str, revision: str, path: str) -> None:
        if (found := self._repo(repo)) is None or (oid := self._commit(found, revision)) is None:
            return None
        blob = found.commits[oid].get(path)
        if blob is None:
            return self._json({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=oid)
        return self._send(200, blob.content, ETag=f'"{blob.oid}"', X_Repo_Commit=oid)


def _apply(files: dict[str, Blob], key: str, value: dict) -> None:
    """Makes one change of a commit."""
    path = value["path"]
    if key == "file":
        files[path] = Blob(base64.b64decode(value["content"]))
    else:
        for name in [name for name in files if name == path or name.startswith(f"{path.rstrip('/')}/")]:
            del files[name]


ROUTES = (
    ("GET", r"/api/whoami-v2", "whoami", True, Handler.whoami),
    ("POST", r"/api/validate-yaml", "validate", False, Handler.validate_yaml),
    ("POST", r"/api/repos/create", "create", True, Handler.create),
    ("POST", rf"/api/models/{REPO}/branch/(?P<revision>.+)", "branch", True, Handler.branch),
    ("GET", rf"/api/models/{REPO}", "info", False, Handler.info),
    ("GET", rf"/api/models/{REPO}/revision/(?P<revision>.+)", "info", False, Handler.info),
    ("GET", rf"/api/models/{REPO}/tree/(?P<revision>[^/]+)(?P<path>/.*)?", "tree", False, Handler.tree),
    ("POST", rf"/api/models/{REPO}/preupload/(?P<revision>.+)", "preupload", True, Handler.preupload),
    ("POST", rf"/api/models/{REPO}/commit/(?P<revision>.+)", "commit", True, Handler.commit),
    ("GET", rf"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve", False, Handler.resolve),
    ("HEAD", rf"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve", False, Handler.resolve),
)
