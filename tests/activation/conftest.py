import pytest

from tests.activation.parallel import saved


@pytest.fixture
def llama(tmp_path) -> str:
    """The folder of a tiny Llama."""
    return saved("llama", tmp_path)
