"""What the hub of the tests keeps: repositories of commits of files."""

import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Blob:
    """A file's content: by its git hash, or, when it is large, by its sha256."""

    content: bytes
    is_large: bool

    @property
    def oid(self) -> str:
        return self.sha256 if self.is_large else self.git_oid

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def git_oid(self) -> str:
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
    entry = {"type": "file", "path": path, "oid": blob.git_oid, "size": len(blob.content)}
    if blob.is_large:
        entry["lfs"] = {"oid": blob.sha256, "size": len(blob.content), "pointerSize": 134}
    return entry
