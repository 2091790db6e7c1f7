import pytest

from tests.trl.harness import save_models


@pytest.fixture
def folder(tmp_path) -> str:
    """A folder with the models of `save_models`, in which a test may save others."""
    pytest.importorskip("trl")
    save_models(tmp_path)
    return str(tmp_path)
