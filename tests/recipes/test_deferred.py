"""Imports that are put off until something is used."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


HEAVY = """
print("imported")
VALUE = 3
class Kind: pass
def function(): return 5
"""
USER = """
import heavy.part
from heavy.part import Kind, function
def at_last(): return function()
def value(): return heavy.part.VALUE
def is_own():
    class Own(Kind): pass
    return issubclass(Own, Kind)
def is_kind(value: Kind | None) -> bool: return isinstance(value, Kind)
"""


def _printed(tmp_path: Path, *lines: str, env: dict[str, str] | None = None) -> list[str]:
    """What lines print in a process in which the package `heavy` is put off."""
    (tmp_path / "heavy").mkdir()
    (tmp_path / "heavy" / "__init__.py").touch()
    (tmp_path / "heavy" / "part.py").write_text(HEAVY)
    (tmp_path / "user.py").write_text(USER)
    begin = ["from hf_zero.recipes import deferred", "deferred._FINDER._roots = {'heavy'}"]
    begin += ["deferred.PUT_OFF['heavy'] = {}", "deferred.put_off_imports()"]
    found = subprocess.run(
        [sys.executable, "-c", "\n".join([*begin, *lines])],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not found.returncode, found.stderr
    return found.stdout.split()


@pytest.mark.quick
@pytest.mark.parametrize(
    "use, printed",
    [
        ("print(user.is_kind(3))", ["False"]),
        ("print(user.at_last())", ["imported", "5"]),
        ("print(user.value())", ["imported", "3"]),
        ("print(bool(user.Kind))", ["imported", "True"]),
        ("from heavy.part import VALUE; print(VALUE == 3, VALUE)", ["imported", "True", "3"]),
        ("print(user.is_own())", ["imported", "True"]),
        ("import heavy.part; print(user.is_kind(heavy.part.Kind()))", ["imported", "True"]),
    ],
)
def test_a_module_that_is_put_off_is_imported_when_it_is_used(tmp_path, use, printed):
    assert _printed(tmp_path, "import user", use) == printed


@pytest.mark.quick
def test_what_is_known_of_a_module_is_looked_up_once_and_forgotten_when_it_is_imported(tmp_path):
    """Torch asks some of it at every operation."""
    told = "import heavy, user; deferred.PUT_OFF['heavy'] = {'known': 4}"
    looks = "print('known' in vars(heavy), heavy.known, 'known' in vars(heavy))"
    then = "user.at_last(); print('known' in vars(heavy))"
    assert _printed(tmp_path, told, looks, then) == ["False", "4", "True", "imported", "False"]


@pytest.mark.quick
@pytest.mark.parametrize(
    "use, printed",
    [
        ("print(heavy.settings.KNOWN)", ["4"]),
        ("heavy.settings.OTHER = 5; import heavy.part; print(heavy.part.OTHER)", ["imported", "5"]),
        ("held = heavy.settings; held.KNOWN = 6; print(held.KNOWN)", ["imported", "6"]),
    ],
)
def test_settings_are_known_until_somebody_changes_one(tmp_path, use, printed):
    told = "import heavy; deferred.PUT_OFF['heavy'] = {'settings': deferred._KnownSettings('heavy.part', KNOWN=4)}"
    assert _printed(tmp_path, told, use) == printed


@pytest.mark.quick
def test_what_is_not_in_a_module_is_missed_where_it_is_imported(tmp_path):
    tried = "try:\n    from heavy.part import other\nexcept ImportError:\n    print('missed')"
    assert _printed(tmp_path, tried) == ["imported", "missed"]


@pytest.mark.quick
def test_nothing_is_put_off_in_a_process_that_is_run_again(tmp_path):
    again = [
        "import os",
        "print('began', flush=True)",
        "import user",
        "deferred.run_again_at_once()",
        "print('ended')",
    ]
    assert _printed(tmp_path, *again) == ["began", "began", "imported", "ended"]
