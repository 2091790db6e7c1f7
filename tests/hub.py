"""A hub in a folder, in place of the requests of `huggingface_hub.HfApi`."""

import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import filter_repo_objects, validate_repo_id


class FakeHub:
    """Repositories are folders `root/user/name/branch`. Only one process may upload.

    Args:
        root (`Path`): where repositories are.
        tokens (`str`): the user's name, by token.
    """

    def __init__(self, root: Path, **tokens: str):
        self.root = root
        self.tokens = tokens
        self.private: dict[str, bool] = {}  # by repository
        self.messages: list[str] = []  # of all commits
        self.num_failures = 0  # how many more uploads fail

    @contextmanager
    def installed(self) -> Iterator["FakeHub"]:
        """Replaces the methods that create and change repositories. Arguments that they do not have are errors."""
        with ExitStack() as stack:
            for method in (self.create_repo, self.create_branch, self.upload_folder):
                patch = mock.patch.object(HfApi, method.__name__, autospec=True, side_effect=method)
                stack.enter_context(patch)
            yield self

    def files(self, repo: str, branch: str = "main") -> dict[str, bytes]:
        folder = self.root / repo / branch
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def create_repo(self, api: HfApi, repo_id: str, *, token=None, private=None, exist_ok=False):
        validate_repo_id(repo_id)
        self._check_token(api, repo_id, token)
        if repo_id not in self.private:
            self.private[repo_id] = bool(private)
            (self.root / repo_id / "main").mkdir(parents=True)
        elif not exist_ok:
            raise _refused(409, "You already created this model repo")
        return SimpleNamespace(repo_id=repo_id)

    def create_branch(self, api: HfApi, repo_id: str, *, branch, token=None, exist_ok=False) -> None:
        self._check_token(api, repo_id, token)
        shutil.copytree(self.root / repo_id / "main", self.root / repo_id / branch, dirs_exist_ok=exist_ok)

    def upload_folder(self, api: HfApi, *, run_as_future: bool = False, **kwargs) -> Future | None:
        return api.run_as_future(self._upload, api, **kwargs) if run_as_future else self._upload(api, **kwargs)

    def _upload(
        self,
        api: HfApi,
        *,
        repo_id,
        folder_path,
        commit_message,
        revision=None,
        token=None,
        path_in_repo="",
        ignore_patterns=None,
        delete_patterns=None,
    ) -> None:
        self._check_token(api, repo_id, token)
        if self.num_failures:
            self.num_failures -= 1
            raise _refused(503, "Service unavailable")
        branch, source = self.root / repo_id / (revision or "main"), Path(folder_path)
        for name in filter_repo_objects(self.files(repo_id, branch.name), allow_patterns=delete_patterns or []):
            (branch / name).unlink()
        names = [str(path.relative_to(source)) for path in sorted(source.rglob("*")) if path.is_file()]
        for name in filter_repo_objects(names, ignore_patterns=ignore_patterns):
            path = branch / path_in_repo / name
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, path)
        self.messages.append(commit_message)

    def _check_token(self, api: HfApi, repo_id: str, token: str | None) -> None:
        user = self.tokens.get(token or api.token)
        if user is None:
            raise _refused(401, "Invalid credentials in Authorization header")
        if user != repo_id.split("/")[0]:
            raise _refused(403, "You don't have write access")


def _refused(status: int, said: str) -> HfHubHTTPError:
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    return HfHubHTTPError(f"{status}: {said}", response=response, server_message=said)
