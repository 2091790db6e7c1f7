"""`python -m tests.wheel`: builds the package as an index would get it, and uses it as one does who has installed it.

The new environment has the wheel alone; what hf_zero depends on is found in the environment that runs this.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path


ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def run(*command: str | Path, folder: Path = ROOT) -> str:
    """What a command prints. One that fails is shown with all that it said."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    if result.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: {result.returncode}\n{result.stdout}{result.stderr}")
    return result.stdout


def build(folder: Path) -> Path:
    """Makes the source distribution, and the wheel out of it."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    (_,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """Makes an environment with the wheel, and with the dependencies of this one.

    Returns:
        `Path`: its folder of programs.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps", wheel)
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    ours = [path for path in sys.path if Path(path).name == "site-packages"]
    Path(packages, "dependencies.pth").write_text("\n".join(ours), encoding="utf-8")
    return python.parent


def check(programs: Path, folder: Path) -> None:
    """Uses what was installed, from a folder in which nothing is."""
    where = run(programs / "python", "-c", "import hf_zero; print(hf_zero.__path__[0])", folder=folder).strip()
    package = Path(where)
    assert package.is_relative_to(programs.parent), f"{where} is not what was installed"
    assert (package / "py.typed").exists()
    installed = {path.name: path.read_bytes() for path in (package / "recipes" / "files").glob("*.yaml")}
    assert installed == {path.name: path.read_bytes() for path in RECIPES}
    assert list(package.parent.glob("hf_zero-*.dist-info/licenses/LICENSE"))
    listed = run(programs / "hf-zero", "list", folder=folder)
    assert [path.name for path in RECIPES if f"  {path.name} " not in listed] == []
    told = run(programs / "hf-zero", "classify", "--config", "quickstart.yaml", "--dry_run", folder=folder)
    assert "dry run: nothing was trained or written" in told
    assert list(folder.iterdir()) == []


def main() -> None:
    """Builds, installs, uses."""
    with tempfile.TemporaryDirectory(prefix="hf_zero_wheel_") as made:
        elsewhere = Path(made, "elsewhere")
        elsewhere.mkdir()
        wheel = build(Path(made, "dist"))
        check(install(wheel, Path(made, "environment")), elsewhere)
        print(f"{wheel.name}, {wheel.stat().st_size / 1024:.0f} KiB: built, installed and used")


if __name__ == "__main__":
    main()
