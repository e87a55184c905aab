"""What `make wheel` runs in an environment that has the wheel and nothing else of ours: is it whole, and does it work?

    python -I tests/packaging/smoke.py dist/penstock-*.whl

-I keeps the sources and PYTHONPATH out. Not a test of pytest's: it must not find the sources, which pytest imports.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2]
IGNORED = {".pyc", ".so"}
PROBE = "penstock/penstock_probe"


def expected_files() -> set[str]:
    """Everything of the package that is tracked, the library, and the program beside it."""
    package = SOURCES / "src/penstock"
    found = {
        f"penstock/{path.relative_to(package)}"
        for path in package.rglob("*")
        if path.is_file() and path.suffix not in IGNORED and not any(part.startswith(".") for part in path.parts[-3:])
    }
    return found | {"penstock/libpenstock.so", PROBE}


def check_contents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert archive.getinfo(PROBE).external_attr >> 16 & 0o111, f"{wheel.name} has a {PROBE} that cannot be run"
    missing, surplus = expected_files() - names, names - expected_files()
    assert not missing, f"{wheel.name} lacks {sorted(missing)}"
    assert not surplus, f"{wheel.name} has {sorted(surplus)}, which is none of its business"
    # The core is a library that ctypes opens: any Python, one platform.
    python, abi, platform = wheel.stem.split("-")[-3:]
    wanted = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert (python, abi, platform) == ("py3", "none", wanted), f"{wheel.name} is not for py3-none-{wanted}"


def check_installed() -> None:
    import penstock

    home = Path(penstock.__file__).resolve()
    assert Path(sys.prefix).resolve() in home.parents, f"penstock is imported from {home}, not from {sys.prefix}"
    assert SOURCES / "src" not in home.parents
    assert importlib.metadata.version("penstock") == penstock.__version__
    assert (home.parent / "py.typed").exists()
    usage = subprocess.run([home.parents[1] / PROBE], stdout=subprocess.PIPE, text=True, check=False)
    assert usage.stdout.startswith("usage: penstock_probe"), usage
    for script in importlib.metadata.distribution("penstock").entry_points:
        if script.group == "console_scripts":
            command = Path(sys.executable).with_name(script.name)
            subprocess.run([command, "--help"], check=True, stdout=subprocess.DEVNULL)


def check_program(folder: Path) -> None:
    """The four lines of the README, at the floor, and the refusal below it."""
    import torch

    import penstock
    from penstock.errors import BelowFloorError

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6))).eval().requires_grad_(False)
    x = torch.randn(3, 64)
    ep = penstock.apply_weight_offload(torch.export.export(model, (x,)))
    penstock.compile(ep, folder / "model.pt2", device="cpu")
    with penstock.Module(folder / "model.pt2", budget="1GiB") as module:
        floor_bytes, resident = module.floor_bytes, module(x)
    with penstock.Module(folder / "model.pt2", budget=floor_bytes) as module:
        assert torch.equal(module(x), resident) and module.last_run.bytes_streamed > 0
    torch.testing.assert_close(resident, model(x))
    refused_bytes = None
    try:
        penstock.Module(folder / "model.pt2", budget=floor_bytes - 1)
    except BelowFloorError as refusal:
        refused_bytes = refusal.floor_bytes
    assert refused_bytes == floor_bytes, "a budget below the floor was accepted, or refused with another floor"


def main() -> None:
    (wheel,) = map(Path, sys.argv[1:])
    check_contents(wheel)
    check_installed()
    with tempfile.TemporaryDirectory(prefix="penstock-smoke-") as folder:
        check_program(Path(folder))
    print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB, whole, and works")


if __name__ == "__main__":
    main()
