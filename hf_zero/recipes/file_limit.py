"""The size limit for files of this process (`ulimit -f`)."""

import resource

from hf_zero.errors import ConfigError, size_text


def check_file_size(name: str, nbytes: int) -> None:
    """Refuses a model whose largest file exceeds the size limit for files of this process."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if resource.RLIM_INFINITY != limit < nbytes:
        raise ConfigError(
            f"ulimit -f: a file may have {size_text(limit)} here, and the largest one of {name} has "
            f"{size_text(nbytes)}; raise the limit (ulimit -f unlimited)"
        )
