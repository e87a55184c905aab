"""The cache: an entry is whole or absent, made once, and never used when it is not what was made."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import pytest

import penstock.store.leases as leases_file
import penstock.store.manifest as manifest_file
from penstock.errors import DiskFullError, OutputPathError
from penstock.store.cache_folder import FOLDER_VARIABLE, cache_folder
from penstock.store.entry_lock import entry_lock
from penstock.store.leases import Leases, unused
from penstock.store.manifest import canonical
from penstock.store.store import Store
from penstock.temporary import PREFIX

ROOT = Path(__file__).parents[2]
KEY = {"model": "tiny", "shapes": [1, 2], "torch": "2.13.0"}
CONTENT = {"model.pt2": b"the program", "notes.json": b"{}"}

# Says what it does, line by line, and waits for a line of input in `make`, and again at the end.
USER = """
import os, signal, sys
from pathlib import Path
from penstock.store.store import Store

def make(folder):
    with open(sys.argv[2], "a") as calls:
        calls.write("x")
    (folder / "model.pt2").write_bytes(b"the program")
    (folder / "notes.json").write_bytes(b"{}")
    print("making", flush=True)
    sys.stdin.readline()

store = Store(Path(sys.argv[1]))
EXTRA
key = {"model": "tiny", "shapes": [1, 2], "torch": "2.13.0"}
print("got", store.entry("programs", key, make, lambda line: print(line, flush=True)), flush=True)
sys.stdin.readline()
"""
# Dies before the step of this number: what writes to the disk for good, and what renames.
DIES = """
import pathlib
step = 0
def dying(real):
    def call(*arguments):
        global step
        if step == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
        step += 1
        return real(*arguments)
    return call
os.fsync, pathlib.Path.rename = dying(os.fsync), dying(pathlib.Path.rename)
"""
FORKS = """
real = make
def make(folder):
    real(folder)
    if os.fork() == 0:
        sys.stdin.read()
        os._exit(0)
"""


class Maker:
    """Counts its calls."""

    def __init__(self, content: dict[str, bytes] = CONTENT) -> None:
        self.content, self.calls, self.said = content, 0, list[str]()

    def make(self, folder: Path) -> None:
        self.calls += 1
        for name, content in self.content.items():
            (folder / name).write_bytes(content)

    def entry(self, store: Store, kind: str = "programs", key: dict[str, Any] = KEY) -> Path:
        return store.entry(kind, key, self.make, self.said.append)


@pytest.fixture
def maker() -> Maker:
    return Maker()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "cache")
    yield made
    made.close()


User = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def user(store: Store, tmp_path: Path) -> Iterator[User]:
    """Processes that want the entry."""
    started: list[subprocess.Popen[str]] = []

    def start(extra: str = "", *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", USER.replace("EXTRA", extra), str(store.folder), str(tmp_path / "calls")]
        process = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def hear(process: subprocess.Popen[str]) -> str:
    return _stream(process.stdout).readline().rstrip("\n")


def tell(process: subprocess.Popen[str]) -> None:
    _stream(process.stdin).write("\n")
    _stream(process.stdin).flush()


def _stream(found: IO[str] | None) -> IO[str]:
    assert found is not None
    return found


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    assert process.wait() == -signal.SIGKILL


def held_files(place: Path) -> dict[str, bytes]:
    return {name: (place / name).read_bytes() for name in CONTENT}


def left(store: Store) -> list[str]:
    """Whatever is beside the entries."""
    return [path.name for path in (store.folder / "programs").iterdir() if path.name.startswith(PREFIX)]


# ------------------------------------------------------------------------------------------------------------- an entry


def test_an_entry_is_made_once(store: Store, maker: Maker) -> None:
    place = maker.entry(store)
    assert place == store.folder / "programs" / hashlib.sha256(canonical(KEY).encode()).hexdigest()[:32]
    assert held_files(place) == CONTENT and json.loads((place / "key.json").read_text()) == KEY
    assert maker.entry(store) == maker.entry(Store(store.folder)) == place
    assert (maker.calls, maker.said, left(store)) == (1, [], [])


def test_what_is_in_the_key_counts_and_its_order_does_not(store: Store, maker: Maker) -> None:
    place = maker.entry(store)
    assert maker.entry(store, key=dict(reversed(KEY.items()))) == place
    others = {maker.entry(store, key={**KEY, "torch": "2.14.0"}), maker.entry(store, "weights")}
    assert place not in others and len(others) == 2 and maker.calls == 3


def test_keys_that_are_no_json_are_refused(store: Store, maker: Maker) -> None:
    with pytest.raises(TypeError):
        maker.entry(store, key={"model": Path("x")})
    with pytest.raises(ValueError):
        maker.entry(store, key={"scale": float("nan")})
    with pytest.raises(ValueError, match="kind is 'other'; it must be one of 'programs', 'weights'"):
        maker.entry(store, "other")
    assert maker.calls == 0 and not store.folder.exists()


def _cut(place: Path) -> None:
    (place / "model.pt2").write_bytes(b"the prog")


def _change(place: Path) -> None:
    (place / "model.pt2").write_bytes(b"the Program")


def _link(place: Path) -> None:
    (place / "model.pt2").rename(place.parents[2] / "elsewhere")
    (place / "model.pt2").symlink_to(place.parents[2] / "elsewhere")


def _pipe(place: Path) -> None:
    (place / "model.pt2").unlink()
    os.mkfifo(place / "model.pt2")


def _manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(place: Path) -> None:
        found = json.loads((place / "manifest.json").read_text())
        change(found)
        (place / "manifest.json").write_text(json.dumps(found))

    return damage


def _linked_folder(place: Path) -> None:
    place.rename(place.parents[2] / "elsewhere")
    place.symlink_to(place.parents[2] / "elsewhere")


def _no_folder(place: Path) -> None:
    place.rename(place.parents[2] / "elsewhere")
    place.write_text("a file")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda place: (place / "model.pt2").unlink(), "model.pt2 is missing"),
    "cut off": (_cut, "model.pt2 has 8 bytes, needs 11"),
    "changed": (_change, "model.pt2 holds other bytes than were written"),
    "link": (_link, "model.pt2 cannot be read: model.pt2 is a link, needs to be a file"),
    "pipe": (_pipe, "model.pt2 cannot be read: model.pt2 is not a file"),
    "no manifest": (
        lambda place: (place / "manifest.json").unlink(),
        "its manifest.json cannot be read: No such file or directory",
    ),
    "empty manifest": (lambda place: (place / "manifest.json").write_text(""), "its manifest.json cannot be read: "),
    "no text": (lambda place: (place / "manifest.json").write_bytes(b"\xff"), "its manifest.json cannot be read: "),
    "deep": (
        lambda place: (place / "manifest.json").write_text("[" * 100_000),
        "its manifest.json cannot be read: ",
    ),
    "format": (_manifest(lambda found: found.update(format=2)), "it is of another format"),
    "no files": (_manifest(lambda found: found.pop("files")), "it lists no files"),
    "files of another kind": (_manifest(lambda found: found.update(files=[{"x": 1}])), "it lists no files"),
    "a way out": (
        _manifest(lambda found: found["files"][0].update(name="../x")),
        "its manifest.json cannot be read: it lists a file without a name",
    ),
    "no word": (
        _manifest(lambda found: found["files"][0].update(sha256=None)),
        "it does not say what is in model.pt2",
    ),
    "other key": (lambda place: (place / "key.json").write_text('{"model":"other"}'), "it was made for another key"),
    "no key": (lambda place: (place / "key.json").unlink(), "its key.json cannot be read: No such file or directory"),
    "linked folder": (_linked_folder, "it is not a folder"),
    "no folder": (_no_folder, "it is not a folder"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_entry_is_made_again(store: Store, maker: Maker, kind: str) -> None:
    damage, told = DAMAGE[kind]
    place = maker.entry(store)
    damage(place)
    assert maker.entry(store) == place
    assert maker.calls == 2 and held_files(place) == CONTENT and not place.is_symlink()
    (line,) = maker.said
    assert line.startswith(f"the program of tiny in {place} is made again: ") and told in line
    assert maker.entry(store) == place and maker.calls == 2 and len(maker.said) == 1 and left(store) == []


def test_a_large_file_is_known_by_its_size_and_time(
    store: Store, maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_file, "_HASHED_BYTES", 10)
    place = maker.entry(store)
    monkeypatch.setattr(manifest_file, "_sha256", lambda descriptor: pytest.fail("11 bytes are not read"))
    (place / "notes.json").unlink()  # which is small, and would be
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["files"] = [file for file in manifest["files"] if file["name"] == "model.pt2"]
    (place / "manifest.json").write_text(json.dumps(manifest))
    assert maker.entry(store) == place and maker.calls == 1
    monkeypatch.undo()
    monkeypatch.setattr(manifest_file, "_HASHED_BYTES", 10)
    changed = (place / "model.pt2").stat()
    os.utime(place / "model.pt2", ns=(changed.st_atime_ns, changed.st_mtime_ns + 1))
    maker.entry(store)
    assert maker.calls == 2 and "model.pt2 was written to after it was made" in maker.said[0]


def test_a_make_that_fails_leaves_nothing(store: Store, maker: Maker) -> None:
    def fail(folder: Path) -> None:
        (folder / "model.pt2").write_bytes(bytes(1000))
        raise error

    for error in (KeyboardInterrupt(), RuntimeError("the compiler"), OSError(errno.EIO, "of the disk")):
        with pytest.raises(type(error)) as caught:
            store.entry("programs", KEY, fail, maker.said.append)
        assert caught.value is error, "as it was"
        assert list((store.folder / "programs").iterdir()) == []
    assert held_files(maker.entry(store)) == CONTENT and maker.said == []


@pytest.mark.parametrize("name", ["manifest.json", "key.json", "used"])
def test_names_of_the_cache_itself_are_refused(store: Store, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is a name of the cache's own"):
        Maker({name: b"x"}).entry(store)
    assert list((store.folder / "programs").iterdir()) == []


def test_folders_and_links_are_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="sub is not a file"):
        store.entry("programs", KEY, lambda folder: (folder / "sub").mkdir(), print)
    with pytest.raises(ValueError, match="sub is a link, needs to be a file"):
        store.entry("programs", KEY, lambda folder: (folder / "sub").symlink_to("/etc/passwd"), print)


def test_a_full_disk_at_every_step(store: Store, maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of replacing a damaged entry: it is then absent or damaged, never half of the new one."""
    for failing in range(100):
        place = maker.entry(store)
        _cut(place)
        steps = 0

        def counted(real: Callable[..., Any], failing: int = failing) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                nonlocal steps
                steps += 1
                if steps == failing + 1:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return real(*arguments)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", counted(os.fsync))
            patch.setattr(Path, "rename", counted(Path.rename))
            try:
                maker.entry(store)
                break
            except DiskFullError as error:
                told = str(error)
        assert str(store.folder) in told and "No space left on device" in told
        assert left(store) == []
        assert held_files(maker.entry(store)) == CONTENT
    assert failing == 8, "two files, key, manifest, folder, two renames, folder"


# ------------------------------------------------------------------------------------------------------------ processes


def test_two_processes_make_it_once(user: User, tmp_path: Path) -> None:
    first = user()
    assert hear(first) == "making"
    second = user()
    assert hear(second) == f"waiting for process {first.pid}, which makes the program of tiny"
    tell(first)
    got = hear(first)
    assert got.startswith("got ") and hear(second) == got
    assert (tmp_path / "calls").read_text() == "x"


def test_a_maker_that_is_killed(user: User, store: Store, tmp_path: Path) -> None:
    first = user()
    assert hear(first) == "making"
    second = user()
    assert hear(second).startswith(f"waiting for process {first.pid}, ")
    (abandoned,) = left(store)
    kill(first)
    assert hear(second) == "making"
    assert abandoned not in left(store), "what it left was swept"
    tell(second)
    place = Path(hear(second).removeprefix("got "))
    assert (tmp_path / "calls").read_text() == "xx" and held_files(place) == CONTENT and left(store) == []


def test_killed_at_every_step(user: User, store: Store, maker: Maker) -> None:
    for step in range(100):
        _cut(maker.entry(store))
        process = user(DIES, str(step))
        assert "is made again: model.pt2 has 8 bytes" in hear(process) and hear(process) == "making"
        tell(process)
        if hear(process):
            break
        assert process.wait() == -signal.SIGKILL
        store.require_space(0)  # which sweeps; making it again would, too, but after the last step it is whole
        assert held_files(maker.entry(store)) == CONTENT and left(store) == []
    assert step == 8


def test_two_threads_make_it_once(store: Store) -> None:
    making, waiting, go = threading.Event(), threading.Event(), threading.Event()
    calls: list[str] = []
    said: list[str] = []

    def make(folder: Path) -> None:
        calls.append("x")
        (folder / "model.pt2").write_bytes(b"the program")
        making.set()
        go.wait()

    def say(line: str) -> None:
        said.append(line)
        waiting.set()

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(store.entry, "programs", KEY, make, say)
        making.wait()
        second = threads.submit(store.entry, "programs", KEY, make, say)
        waiting.wait()
        go.set()
        assert first.result() == second.result()
    assert calls == ["x"] and said == [f"waiting for process {os.getpid()}, which makes the program of tiny"]


def test_other_entries_are_not_waited_for(user: User, store: Store, maker: Maker) -> None:
    assert hear(user()) == "making"
    maker.entry(store, "weights")
    maker.entry(store, key={"model": "other"})
    assert maker.calls == 2 and maker.said == []


def test_a_child_that_lives_on_keeps_no_lock(user: User, store: Store) -> None:
    """A compiler's helpers may be forked in `make`, with every descriptor, and stay."""
    process = user(FORKS)
    assert hear(process) == "making"
    tell(process)
    place = Path(hear(process).removeprefix("got "))
    with entry_lock(store.folder / "locks" / f"programs-{place.name}", "tries", None) as had:
        assert had


def test_whoever_gives_up_waiting_takes_nothing_from_the_holder(tmp_path: Path) -> None:
    def give_up(line: str) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "lock"
    with entry_lock(path, "makes it", None) as first:
        with pytest.raises(KeyboardInterrupt), entry_lock(path, "waits", give_up):
            pass
        with entry_lock(path, "tries", None) as second:
            assert first and not second
        assert path.read_text() == f"process {os.getpid()}, which makes it"
    assert path.read_text() == ""


def test_without_locks_it_works_alone(store: Store, maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", none)
    place = maker.entry(store)
    assert maker.entry(store) == place and maker.calls == 1
    store.close()
    assert store.clear() > 0 and store.list() == []


# ------------------------------------------------------------------------------------------------------- list and clear


def test_list(store: Store, maker: Maker) -> None:
    assert store.list() == [] and not store.folder.exists()
    first, second = maker.entry(store), maker.entry(store, key={"model": "other"})
    third = maker.entry(store, "weights", {"no": "model"})
    os.utime(first / "used", (2000, 2000))
    os.utime(second / "used", (1000, 1000))
    (store.folder / "programs" / "something else").mkdir()
    found = store.list()
    assert [entry.path for entry in found] == [first, second, third]
    assert [entry.key for entry in found] == [KEY, {"model": "other"}, {"no": "model"}]
    assert [entry.model for entry in found] == ["tiny", "other", None]
    assert [entry.used_s for entry in found][:2] == [2000, 1000]
    assert found[0].created_s == (first / "manifest.json").stat().st_mtime
    assert found[0].nbytes == sum(path.stat().st_size for path in first.iterdir()) > 13
    maker.entry(store)
    assert store.list()[0].used_s > 2000, "the use was recorded"
    for damaged in ('{"model":1e999}', '{"model":"another"}', '{"model":' + "[" * 600 + "]" * 600 + "}", "{", "\ud800"):
        (first / "key.json").write_bytes(damaged.encode(errors="surrogatepass"))
        assert [entry.key for entry in store.list()] == [None, {"model": "other"}, {"no": "model"}]


def test_clear(store: Store, maker: Maker) -> None:
    assert store.clear() == 0 and not store.folder.exists()
    maker.entry(store)
    maker.entry(store, "weights")
    programs, weights = (entry.nbytes for entry in store.list())
    store.close()
    assert store.clear("weights") == weights and [entry.kind for entry in store.list()] == ["programs"]
    assert store.clear() == programs and store.list() == [] and left(store) == []
    assert held_files(maker.entry(store)) == CONTENT and maker.calls == 3


def test_clear_takes_what_killed_processes_left(user: User, store: Store) -> None:
    process = user()
    assert hear(process) == "making"
    kill(process)
    assert left(store) and store.clear() == len(b"the program") + len(b"{}") and left(store) == []


def test_what_is_being_made_stays(user: User, store: Store, maker: Maker) -> None:
    _cut(maker.entry(store))
    store.close()
    process = user()
    assert "is made again" in hear(process) and hear(process) == "making"
    said: list[str] = []
    assert store.clear(say=said.append) == 0
    assert len(said) == 1 and said[0].endswith("is in use, and stays") and "the program of tiny" in said[0]
    tell(process)
    assert held_files(Path(hear(process).removeprefix("got "))) == CONTENT


def test_what_is_in_use_stays(user: User, store: Store) -> None:
    process = user()
    assert hear(process) == "making"
    tell(process)
    place = Path(hear(process).removeprefix("got "))
    assert store.clear() == 0 and held_files(place) == CONTENT
    kill(process)
    assert store.clear() > 0 and not place.exists()


def test_a_mapped_file_outlives_its_name(store: Store, maker: Maker) -> None:
    with (maker.entry(store) / "model.pt2").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    store.close()
    assert store.clear() > 0 and mapped[:] == b"the program"


def test_cleared_between_the_opening_and_the_locking(
    store: Store, maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = maker.entry(store)
    store.close()
    real = leases_file._open_stamp

    def late(path: Path) -> int | None:
        stamp = real(path)
        monkeypatch.setattr(leases_file, "_open_stamp", real)
        assert Store(store.folder).clear() > 0
        return stamp

    monkeypatch.setattr(leases_file, "_open_stamp", late)
    assert maker.entry(store) == place and maker.calls == 2 and held_files(place) == CONTENT


def test_nobody_begins_to_use_what_is_being_cleared(store: Store, maker: Maker) -> None:
    place = maker.entry(store)
    store.close()
    leases = Leases()
    with unused(place) as free:
        assert free and not leases.take(place)
    assert leases.take(place)
    with unused(place) as free:
        assert not free
    leases.drop(place)
    with unused(place) as free:
        assert free


def test_a_store_that_goes_lets_go(store: Store, maker: Maker) -> None:
    gc.collect()  # what earlier tests have left goes now, and not while this one counts
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    other = Store(store.folder)
    maker.entry(other)
    maker.entry(other)
    assert store.clear() == 0
    del other
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    assert store.clear() > 0


# ----------------------------------------------------------------------------------------------------------- the folder


def test_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Store().folder == tmp_path / ".cache/penstock"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / ".cache/penstock"
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert cache_folder() == Path("/shared/penstock")
    monkeypatch.setenv(FOLDER_VARIABLE, "~/models")
    assert cache_folder() == tmp_path / "models"
    assert cache_folder(Path("/given")) == Path("/given")
    with pytest.raises(OutputPathError, match="no home folder is known"):
        cache_folder(Path("~no-such-user/x"))


def test_it_is_private(store: Store, maker: Maker) -> None:
    earlier = os.umask(0)
    try:
        place = maker.entry(store)
    finally:
        os.umask(earlier)
    for folder in (store.folder, place.parent, place, store.folder / "locks"):
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o702])
@pytest.mark.parametrize("below", ["", "programs"])
def test_others_who_may_write_are_refused(store: Store, maker: Maker, mode: int, below: str) -> None:
    maker.entry(store)
    (store.folder / below).chmod(mode)
    for use in (lambda: maker.entry(store), store.list, store.clear):
        with pytest.raises(OutputPathError, match=f"has mode {mode:04o}, others may write to it: .* chmod go-w"):
            use()
    assert maker.calls == 1


def test_another_users_folder_is_refused(store: Store, maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    maker.entry(store)
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    for use in (lambda: maker.entry(store), store.list, store.clear):
        with pytest.raises(OutputPathError, match=f"belongs to user {mine}, needs to belong to user {mine + 1}"):
            use()


def test_a_file_in_its_place(tmp_path: Path, maker: Maker) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputPathError, match="it is not a folder"):
        maker.entry(Store(tmp_path / "file"))
    with pytest.raises(OutputPathError, match="cannot be written to: Not a directory"):
        maker.entry(Store(tmp_path / "file" / "below"))
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OutputPathError, match="cannot be used: No such file"):
        maker.entry(Store(tmp_path / "dangling"))


def test_space(user: User, store: Store) -> None:
    store.require_space(1)
    assert not store.folder.exists()
    process = user()
    assert hear(process) == "making"
    kill(process)
    with pytest.raises(DiskFullError, match=rf"{store.folder}: needs {2**62} bytes, \d+ bytes are free") as caught:
        store.require_space(2**62)
    assert caught.value.errno == errno.ENOSPC
    assert left(store) == [], "what can be had is had first"


def test_importing_it_takes_the_standard_library_only() -> None:
    code = "import sys, penstock.store.store, penstock.store.shards; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    tops = {name.split(".")[0] for name in done.stdout.split()}
    assert "penstock" in tops and not tops & {"torch", "numpy", "transformers", "click", "rich", "safetensors"}
