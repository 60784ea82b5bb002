"""Environments are resolved and built from a local index, confined, once, and read-only."""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infra.ports.packages import DeclaredPackages, ResolvedPackages
from infra.sandbox.environments.environments import PackageEnvironments
from infra.sandbox.environments.interpreters import find_pythons
from infra.sandbox.environments.removal import make_room
from infra.sandbox.environments.uv_process import UvTask, prepared_folder, run_confined
from infra.sandbox.interpreter import Interpreter, find_interpreter
from infra.sandbox.levels.bubblewrap import SandboxProcess
from infra.sandbox.levels.probe import choose_level
from infra.sandbox.user_process import UserProcess
from infra.settings.packages import PackageSettings
from schemas.artifact_refs import ArtifactRef
from schemas.errors import Refused, TransientError
from schemas.specs import PackageEnvironment
from tests.kit.package_index import LocalIndex, serve_index

PATH = "rollouts/x/pyproject.toml"


@pytest.fixture(autouse=True)
def _no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.sandbox.environments.uv_process.RETRIES", 0)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[LocalIndex]:
    with serve_index(tmp_path / "index") as made:
        made.add_wheel("one", "1.0", requires=["two>=1"])
        made.add_wheel("two", "1.0")
        made.add_wheel("two", "2.0")
        yield made


@pytest.fixture
def settings(index: LocalIndex) -> Iterator[PackageSettings]:
    root = Path(tempfile.mkdtemp(prefix="headrace-test-"))
    root.chmod(0o755)
    yield PackageSettings(directory=root / "environments", index=index.url)
    shutil.rmtree(root)


@pytest.fixture
def environments(settings: PackageSettings) -> Iterator[PackageEnvironments]:
    made = PackageEnvironments(choose_level("bwrap"), settings)
    yield made
    made.close()


def asking(*dependencies: str, lock: str | None = None, python: str = "") -> DeclaredPackages:
    return DeclaredPackages(path=PATH, dependencies=dependencies, lock=lock, requires_python=python)


def ref_of(resolved: ResolvedPackages) -> PackageEnvironment:
    pins = resolved.pins.encode()
    lock = ArtifactRef(uri="m:", sha256=hashlib.sha256(pins).hexdigest(), size=len(pins))
    return PackageEnvironment(
        key=resolved.key, lock=lock, python=resolved.python, platform=resolved.platform
    )


async def built(environments: PackageEnvironments, *dependencies: str) -> Path:
    """Resolve and build, and return the Python of the environment."""
    resolved = await environments.resolve(asking(*dependencies))
    return (await environments.get(ref_of(resolved), resolved.pins.encode())).path


async def test_packages_are_pinned_built_and_imported(environments: PackageEnvironments) -> None:
    resolved = await environments.resolve(asking("one", "two<2"))
    assert resolved.count == 2
    assert "one==1.0" in resolved.pins
    assert "two==1.0" in resolved.pins
    python = await environments.get(ref_of(resolved), resolved.pins.encode())
    program = "import one, two; print(one.VERSION, two.VERSION)"
    said = subprocess.run(  # noqa: ASYNC221 - it takes milliseconds
        [python.path, "-I", "-c", program], capture_output=True, check=True
    )
    assert said.stdout.split() == [b"1.0", b"1.0"]
    modes = [
        path.lstat()
        for path in python.path.parents[1].rglob("*")
        if not path.is_dir() and not path.is_symlink()
    ]
    assert {told.st_uid for told in modes} == {os.geteuid()}
    assert {oct(told.st_mode & 0o222) for told in modes} == {"0o0"}


async def test_an_environment_is_built_once(
    environments: PackageEnvironments, settings: PackageSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = await environments.resolve(asking("one"))
    ref, pins = ref_of(resolved), resolved.pins.encode()
    builds: list[str] = []
    build = PackageEnvironments._build

    async def counted(self: PackageEnvironments, *parts: object) -> None:
        builds.append(str(parts[0]))
        await build(self, *parts)  # type: ignore[arg-type]  # passed on as they are

    monkeypatch.setattr(PackageEnvironments, "_build", counted)
    others = [PackageEnvironments(choose_level("bwrap"), settings) for _ in range(7)]
    left = settings.directory / f"{ref.key}-killed.partial"
    left.mkdir()
    await asyncio.gather(*(each.get(ref, pins) for each in (environments, *others) * 2))
    for other in others:
        other.close()
    assert builds == [ref.key]
    assert not left.exists()


async def test_a_cancelled_wait_for_a_build_keeps_no_lock(
    environments: PackageEnvironments, settings: PackageSettings
) -> None:
    resolved = await environments.resolve(asking("two"))
    ref, pins = ref_of(resolved), resolved.pins.encode()
    held = os.open(settings.directory / f"{ref.key}.lock", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX)
    waiting = asyncio.ensure_future(environments.get(ref, pins))
    await asyncio.sleep(0.3)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    os.close(held)
    async with asyncio.timeout(20):
        await environments.get(ref, pins)


@pytest.mark.parametrize(
    ("asked", "says", "advice"),
    [
        (("one", "two<1"), "you require two<1", "change the versions"),
        (("absent",), "absent was not found", "correct the name"),
        (("only-source",), "only-source==1.0 has no usable wheels", "leave the package out by"),
        (("elsewhere",), "no wheels with a matching platform tag", "has a wheel for this platform"),
    ],
)
async def test_a_failed_resolution_quotes_uv(
    environments: PackageEnvironments,
    index: LocalIndex,
    asked: tuple[str, ...],
    says: str,
    advice: str,
) -> None:
    index.add_source("only-source", "1.0")
    index.add_wheel("elsewhere", "1.0", tag="cp311-cp311-win_amd64")
    with pytest.raises(Refused) as refused:
        await environments.resolve(asking(*asked))
    assert PATH in str(refused.value)
    assert says in str(refused.value)
    assert advice in str(refused.value)


INFO = "evil-1.0.dist-info"
NESTED = f"{'(' * 20_000}python_version > '3'{')' * 20_000}"


@pytest.mark.parametrize(
    ("files", "says", "advice"),
    [
        ({"good-1.0.dist-info/METADATA": ""}, "Multiple .dist-info", "whose wheel is in order"),
        (
            {f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: evil\nVersion: 2.0\n"},
            "Wheel version does not match",
            "whose wheel is in order",
        ),
        (
            {f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: good\nVersion: 1.0\n"},
            "Package metadata name `good`",
            "whose wheel is in order",
        ),
        ({f"{INFO}/METADATA": "nothing"}, "has invalid metadata", "whose wheel is in order"),
        (
            {
                f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n"
                "Requires-Dist: two @ http://169.254.169.254/two-1.0-py3-none-any.whl\n"
            },
            "included as a URL dependency",
            "packages come from the index only",
        ),
        (
            {
                f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n"
                f"Requires-Dist: two; {NESTED}\n"
            },
            "overflowed its stack",
            "leave out the package that was added last",
        ),
    ],
)
async def test_a_package_that_is_not_in_order_is_to_be_left_out(
    environments: PackageEnvironments,
    index: LocalIndex,
    files: dict[str, str],
    says: str,
    advice: str,
) -> None:
    """And nobody is told to change a lock that there is not."""
    index.add_wheel("evil", "1.0", files={"evil.py": "", **files})
    with pytest.raises(Refused) as refused:
        await built(environments, "evil")
    assert says in str(refused.value)
    assert advice in str(refused.value)
    assert "uv.lock" not in str(refused.value)


async def test_metadata_that_unpacks_to_more_than_the_memory_is_refused(
    environments: PackageEnvironments, index: LocalIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel of 1 MB took 4 GiB of the machine before there was a limit."""
    monkeypatch.setattr("infra.sandbox.environments.uv_process.MEMORY_BYTES", 1 << 30)
    head = "Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n"
    text = head + "Requires-Dist: evil\n" * (128 << 20 >> 4)
    index.add_wheel("evil", "1.0", files={"evil.py": "", f"{INFO}/METADATA": text})
    with pytest.raises(Refused, match=r"leave out the package that was added last.*memory alloc"):
        await environments.resolve(asking("evil"))


async def test_an_index_that_is_away_is_named(settings: PackageSettings) -> None:
    away = replace(settings, index="http://127.0.0.1:9/simple")
    with pytest.raises(Refused, match=r"http://127.0.0.1:9/simple cannot be reached"):
        await PackageEnvironments(choose_level("bwrap"), away).resolve(asking("one"))


async def test_an_index_that_is_away_while_building_is_tried_again(
    environments: PackageEnvironments, settings: PackageSettings
) -> None:
    resolved = await environments.resolve(asking("one"))
    away = PackageEnvironments(
        choose_level("bwrap"), replace(settings, index="http://127.0.0.1:9/simple")
    )
    with pytest.raises(TransientError, match="cannot be reached"):
        await away.get(ref_of(resolved), resolved.pins.encode())
    away.close()


@pytest.mark.parametrize("look_s", [0.01, 20.0])
async def test_an_environment_has_a_limit_of_bytes(
    settings: PackageSettings, index: LocalIndex, monkeypatch: pytest.MonkeyPatch, look_s: float
) -> None:
    """Whether the size is seen while uv works, or uv ends because a file reached the limit."""
    index.add_wheel("large", "1.0", padding=8 << 20)
    small = PackageEnvironments(choose_level("bwrap"), replace(settings, largest_bytes=4 << 20))
    monkeypatch.setattr("infra.sandbox.environments.uv_process.LOOK_S", look_s)
    resolved = await small.resolve(asking("large"))
    with pytest.raises(Refused, match=r"more than 4 MiB .*use fewer or smaller packages"):
        await small.get(ref_of(resolved), resolved.pins.encode())
    small.close()
    assert not list(settings.directory.glob("*.partial"))


async def test_a_python_that_nobody_has_is_refused_with_those_that_exist(
    environments: PackageEnvironments,
) -> None:
    with pytest.raises(Refused, match=find_pythons(())[0].text):
        await environments.resolve(asking("one", python=">=3.99"))


def test_directories_of_pythons_can_be_named(tmp_path: Path) -> None:
    program = tmp_path / "pythons" / "a" / "bin" / "python3.14"
    program.parent.mkdir(parents=True)
    said = '[[3, 14, 9], "/opt/a", "cpython", "/opt/a/bin/python3.14"]'
    program.write_text(f"#!/bin/sh\necho '{said}'\n")
    program.chmod(0o755)
    found = {python.text: python for python in find_pythons((tmp_path / "pythons",))}
    assert found["3.14.9"].prefix == Path("/opt/a")


async def test_pins_with_another_hash_are_refused(environments: PackageEnvironments) -> None:
    resolved = await environments.resolve(asking("one"))
    with pytest.raises(Refused, match="hash"):
        await environments.get(ref_of(resolved), resolved.pins.encode() + b"\n")


async def test_another_platform_is_refused(environments: PackageEnvironments) -> None:
    other = (await environments.resolve(asking("one"))).model_copy(update={"platform": "win-amd64"})
    with pytest.raises(Refused, match="are for win-amd64"):
        await environments.get(ref_of(other), other.pins.encode())


LOCK = """version = 1
requires-python = ">=3.11"

[[package]]
name = "x"
version = "0"
source = { virtual = "." }
dependencies = [{ name = "two" }]

[package.metadata]
requires-dist = [{ name = "two", specifier = ">=1" }]

[[package]]
name = "two"
version = "1.0"
source = { registry = "https://elsewhere.example/simple" }
wheels = [{ url = "https://elsewhere.example/two-1.0-py3-none-any.whl", hash = "sha256:HASH" }]
"""


REGISTRY = 'registry = "https://elsewhere.example/simple"'


async def test_a_lock_decides_the_versions_and_the_index_stays_ours(
    environments: PackageEnvironments, settings: PackageSettings, tmp_path: Path
) -> None:
    wheel = tmp_path / "index/simple/two/two-1.0-py3-none-any.whl"
    lock = LOCK.replace("HASH", hashlib.sha256(wheel.read_bytes()).hexdigest())
    resolved = await environments.resolve(asking("two>=1", lock=lock))
    assert "two==1.0" in resolved.pins
    await environments.get(ref_of(resolved), resolved.pins.encode())


@pytest.mark.parametrize(
    ("lock", "asked", "says"),
    [
        (LOCK.replace("HASH", "0" * 64), "two>=2", "is older than"),
        ("version = [", "two", "cannot be read"),
        ("a." * 500_000 + "a = 1", "two", "cannot be read: it is nested more than 32 levels deep"),
        (
            LOCK.replace(REGISTRY, 'git = "https://x/y"'),
            "two>=1",
            "git",
        ),
        (
            LOCK.replace(REGISTRY, 'path = "/etc"'),
            "two>=1",
            "path",
        ),
    ],
)
async def test_a_lock_that_does_not_fit_is_refused(
    environments: PackageEnvironments, lock: str, asked: str, says: str
) -> None:
    with pytest.raises(Refused, match=r"rollouts/x/uv\.lock") as refused:
        await environments.resolve(asking(asked, lock=lock))
    assert says in str(refused.value)


async def test_a_lock_for_another_platform_says_so_when_it_is_installed(
    environments: PackageEnvironments, index: LocalIndex
) -> None:
    index.add_wheel("two", "3.0", tag="cp311-cp311-win_amd64")
    lock = LOCK.replace("HASH", "0" * 64).replace('version = "1.0"', 'version = "3.0"')
    lock = lock.replace("two-1.0-py3-none-any", "two-3.0-cp311-cp311-win_amd64")
    resolved = await environments.resolve(asking("two>=1", lock=lock))
    with pytest.raises(
        Refused, match=r"(?s)run `uv lock` for this platform.*two==3\.0 has no wheels"
    ):
        await environments.get(ref_of(resolved), resolved.pins.encode())


async def test_a_lock_of_a_package_without_wheels_says_so_when_it_is_installed(
    environments: PackageEnvironments, index: LocalIndex
) -> None:
    """Its build backend is not run, and another lock would not help."""
    index.add_source("two", "3.0")
    file = 'sdist = { url = "https://elsewhere.example/two-3.0.tar.gz", hash = "sha256:%s" }'
    lock = LOCK.partition("wheels =")[0].replace('"1.0"', '"3.0"') + file % ("0" * 64)
    wrong = LOCK.replace("HASH", "0" * 64).replace('version = "1.0"', 'version = "3.0"')
    with pytest.raises(Refused, match="run `uv lock` again"):
        await environments.resolve(asking("two>=1", lock=wrong))
    resolved = await environments.resolve(asking("two>=1", lock=lock))
    with pytest.raises(Refused, match=r"leave the package out by tool\.uv") as refused:
        await environments.get(ref_of(resolved), resolved.pins.encode())
    assert "remove uv.lock" not in str(refused.value)


async def test_certificates_of_the_operator_are_seen_from_a_private_directory(
    environments: PackageEnvironments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "private" / "ca.pem"
    file.parent.mkdir(mode=0o700)
    file.write_text("a certificate")
    file.chmod(0o600)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    environments._prepare()
    folder = prepared_folder(environments._directory, "look")
    python = Interpreter(Path("/usr/bin/python3"), ())
    task = UvTask("a look", folder, python, 1 << 20)
    assert "a certificate" in await run_confined(
        environments._level, ["/usr/bin/cat", str(file)], task
    )


LEAVE_A_WRITER = """
import os, time
if os.fork() == 0:
    os.setsid()
    for descriptor in range(3):
        os.close(descriptor)
    while True:
        with open("ticks", "a") as file:
            file.write("x")
        time.sleep(0.001)
while not os.path.exists("ticks"):
    time.sleep(0.01)
"""


@pytest.mark.parametrize(("level", "goes_on"), [("bwrap", False), ("process-trusted", True)])
async def test_a_leftover_process_writes_nothing_after_its_command(
    settings: PackageSettings, level: str, goes_on: bool
) -> None:
    """The twin is the level that promises nothing."""
    environments = PackageEnvironments(choose_level(level), settings)
    environments._prepare()
    folder = prepared_folder(environments._directory, "look")
    python = find_interpreter()
    program = [str(python.path), "-I", "-S", "-c", LEAVE_A_WRITER]
    await run_confined(environments._level, program, UvTask("a look", folder, python, 1 << 20))
    before = (folder / "ticks").stat().st_size
    await asyncio.sleep(0.3)
    assert ((folder / "ticks").stat().st_size > before) is goes_on
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (place / "cwd").readlink() == folder:
                os.kill(int(place.name), signal.SIGKILL)


async def test_nothing_is_used_while_a_process_that_wrote_it_does_not_end(
    environments: PackageEnvironments, settings: PackageSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = await environments.resolve(asking("one"))
    end = UserProcess.end

    async def give_up(self: UserProcess, *, within_s: float) -> bool:
        await end(self, within_s=within_s)
        return False

    monkeypatch.setattr(SandboxProcess, "end", give_up)
    with pytest.raises(TransientError, match="does not end"):
        await environments.get(ref_of(resolved), resolved.pins.encode())
    assert not (settings.directory / resolved.key).exists()


async def test_settings_of_this_machine_do_not_leak_in(
    environments: PackageEnvironments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert (await environments.resolve(asking("two"))).count == 1


async def test_environments_in_use_stay_and_unused_ones_are_removed(
    environments: PackageEnvironments, settings: PackageSettings
) -> None:
    first, second = [(await built(environments, asked)).parents[1] for asked in ("two<2", "two>=2")]
    await built(environments, "two<2")
    environments.release(first.name)
    environments.release(second.name)
    assert make_room(settings.directory, 0) == 1
    assert [first.exists(), second.exists()] == [True, False]
    environments.release(first.name)
    assert make_room(settings.directory, 0) == 1
    assert not first.exists()


def test_leftovers_of_killed_processes_are_removed(settings: PackageSettings) -> None:
    settings.directory.mkdir()
    removed, old, new = (
        settings.directory / name for name in ("a.removed", "old.partial", "new.partial")
    )
    for path in (removed, old, new):
        path.mkdir()
        (path / "file").write_text("x")
    os.utime(old, (0, 0))
    assert make_room(settings.directory, 1 << 30) == 0
    assert [path.exists() for path in (removed, old, new)] == [False, False, True]


def test_copies_that_no_environment_needs_are_removed(settings: PackageSettings) -> None:
    pythons = settings.directory / "pythons"
    environment = settings.directory / ("e" * 64)
    needed, unused, new = (pythons / f"cpython-3.{minor}.0-x" for minor in (11, 12, 13))
    for path in (needed, unused, new, environment):
        path.mkdir(parents=True)
    (environment / "pyvenv.cfg").write_text(f"home = {needed}/bin\nversion = 3.11\n")
    old_uv, new_uv = settings.directory / "uv-1-a", settings.directory / "uv-2-b"
    for path in (old_uv, new_uv):
        path.write_bytes(b"uv")
    for path in (needed, unused, old_uv):
        os.utime(path, (0, 0))
    make_room(settings.directory, 1 << 30)
    left = [path.exists() for path in (needed, unused, new, old_uv, new_uv)]
    assert left == [True, False, True, False, True]


BUILDER = """
import asyncio, sys
from pathlib import Path
from infra.sandbox.environments.environments import PackageEnvironments
from infra.sandbox.levels.probe import choose_level
from infra.settings.packages import PackageSettings
from schemas.specs import PackageEnvironment

directory, index, ref, pins = sys.argv[1:]
settings = PackageSettings(directory=Path(directory), index=index)
made = PackageEnvironments(choose_level("bwrap"), settings)
asyncio.run(made.get(PackageEnvironment.model_validate_json(ref), pins.encode()))
"""


async def test_a_killed_builder_leaves_nothing_that_is_used(
    environments: PackageEnvironments, settings: PackageSettings
) -> None:
    resolved = await environments.resolve(asking("one"))
    ref, pins = ref_of(resolved), resolved.pins.encode()
    arguments = (str(settings.directory), str(settings.index), ref.model_dump_json(), resolved.pins)
    builder = await asyncio.create_subprocess_exec(sys.executable, "-c", BUILDER, *arguments)
    async with asyncio.timeout(60):
        while not list(settings.directory.glob(f"{ref.key}-*.partial/env")):
            assert builder.returncode is None
            await asyncio.sleep(0.005)
    builder.kill()
    await builder.wait()
    assert not (settings.directory / ref.key).exists()
    await environments.get(ref, pins)
    assert not list(settings.directory.glob("*.partial"))
