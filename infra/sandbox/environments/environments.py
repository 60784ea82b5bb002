"""The environments of rollouts on this machine: each is built once, is read-only, and is shared by all
processes.

A file that is locked while an environment is built keeps other processes from building it too. It is
built beside its place and then renamed, so a killed builder leaves nothing that could be used.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from infra.ports.packages import DeclaredPackages, ResolvedPackages, environment_key
from infra.sandbox.environments.advice import advise, is_away, shorten
from infra.sandbox.environments.index_relay import IndexRelay
from infra.sandbox.environments.interpreters import choose_python, python_of, reachable_python
from infra.sandbox.environments.removal import EnvironmentUse, make_room, remove_partials
from infra.sandbox.environments.reserved_files import check_reserved, take_reserved
from infra.sandbox.environments.resolution import (
    check_pins,
    count_pins,
    index_options,
    read_pins,
    write_inputs,
)
from infra.sandbox.environments.uv_process import (
    UvFailed,
    UvTask,
    find_uv,
    prepared_folder,
    run_confined,
)
from infra.sandbox.interpreter import Interpreter
from infra.sandbox.levels.level import Level
from infra.sandbox.user_process import user_group, user_uids
from infra.sandbox.written_trees import (
    SEAL,
    has_directory,
    measure_tree,
    move_tree,
    open_tree,
    remove_tree,
    seal_tree,
)
from infra.settings.packages import INDEX, PackageSettings
from schemas.artifact_refs import ArtifactRef
from schemas.errors import Refused, TransientError
from schemas.specs import PackageEnvironment

logger = logging.getLogger(__name__)

LOCK_S = 0.1
RESOLVE_BYTES, RESOLVE_S = 1 << 30, 300.0
LESS = "ask it for less"


class PackageEnvironments:
    """Resolves packages and builds environments below the directory of `settings`."""

    def __init__(self, level: Level, settings: PackageSettings) -> None:
        self._level = level
        self._settings = settings
        self._directory = settings.directory
        self._building: dict[str, asyncio.Lock] = {}
        self._used: dict[str, EnvironmentUse] = {}
        self._users: Counter[str] = Counter()

    async def resolve(self, declared: DeclaredPackages) -> ResolvedPackages:
        """Return the exact versions of the packages of a rollout. Raises Refused, with the file and the
        words of uv, when there are none, and when the index cannot be reached."""
        self._prepare()
        named = self._settings.pythons
        found = await asyncio.to_thread(
            choose_python, declared.requires_python, declared.path, named
        )
        python = await asyncio.to_thread(reachable_python, found, self._directory)
        folder = prepared_folder(self._directory, "resolve")
        try:
            arguments = await asyncio.to_thread(write_inputs, declared, folder)
            index = index_options(self._settings.index)
            own = ("--python", str(python.path))
            uv = str(find_uv(self._directory))
            async with self._way_out(declared.path) as relay:
                task = UvTask(declared.path, folder, python, RESOLVE_BYTES, relay, RESOLVE_S)
                await run_confined(self._level, [uv, *arguments, *own, *index], task)
            pins = read_pins(folder, declared.path)
        except UvFailed as failed:
            raise self._refusal(failed, declared.path) from failed
        finally:
            await asyncio.to_thread(remove_tree, folder)
        return ResolvedPackages(
            pins=pins, python=found.minor, platform=platform(), count=count_pins(pins)
        )

    async def get(self, ref: PackageEnvironment, pins: bytes) -> Interpreter:
        """Return the Python of an environment, which is built if this machine does not have it. It stays
        until `release`, which is called once for each return of this. Raises Refused when that is
        impossible here, and TransientError when the index is away."""
        if environment_key(pins, ref.python, ref.platform) != ref.key:
            raise Refused(
                "the packages of this rollout do not have the hash that its commit was given"
            )
        if ref.platform != platform():
            raise Refused(
                f"the packages of this rollout are for {ref.platform}, and this machine is "
                f"{platform()}; run it where it was synced, or sync it again here"
            )
        self._prepare()
        found = await asyncio.to_thread(python_of, ref.python, self._settings.pythons)
        base = await asyncio.to_thread(reachable_python, found, self._directory)
        place = self._directory / ref.key
        self._users[ref.key] += 1
        try:
            async with self._building.setdefault(ref.key, asyncio.Lock()):
                if ref.key not in self._used:
                    self._used[ref.key] = await asyncio.to_thread(EnvironmentUse, place)
                if not has_directory(place):
                    await self._build_once(ref.key, pins.decode(), base)
        except BaseException:  # a cancellation, too
            self.release(ref.key)
            raise
        self._used[ref.key].touch()
        return Interpreter(place / "bin" / "python", (place, *base.files))

    @asynccontextmanager
    async def unpack(self, requirement: str) -> AsyncIterator[Path]:
        """The files of one package, without those that it needs, until the block ends. Nothing of it
        runs. Raises Refused, with the words of uv, when it has no wheel that can be unpacked, and when
        the index cannot be reached."""
        self._prepare()
        found = await asyncio.to_thread(choose_python, "", requirement, self._settings.pythons)
        python = await asyncio.to_thread(reachable_python, found, self._directory)
        folder = prepared_folder(self._directory, "unpack")
        unpacking = (
            *(str(find_uv(self._directory)), "pip", "install", "--quiet", "--no-deps"),
            *("--only-binary", ":all:", "--target", "out", "--python", str(python.path)),
            *(requirement, *index_options(self._settings.index)),
        )
        most = self._settings.largest_bytes
        try:
            async with self._way_out(requirement) as relay:
                task = UvTask(requirement, folder, python, most, relay)
                await run_confined(self._level, unpacking, task)
            folder.chmod(0o700)  # nobody but us exchanges what is in it from now on
            yield folder / "out"
        except UvFailed as failed:
            raise self._refusal(failed, requirement) from failed
        finally:
            await asyncio.to_thread(remove_tree, folder)

    @asynccontextmanager
    async def run_python(
        self,
        declared: DeclaredPackages,
        arguments: Sequence[str],
        *,
        most_bytes: int,
        within_s: float,
    ) -> AsyncIterator[tuple[Path, str | None]]:
        """Run a Python that has these packages, without a network. Gives the directory in which it
        could write, until the block ends, and what it said if it failed. Versions that were installed
        before are used again, so the index is not needed for them. Raises Refused when the packages
        cannot be installed, and when a limit is exceeded."""
        python, ref = await self._get_for_tool(declared)
        folder = prepared_folder(self._directory, "run")
        try:
            task = UvTask(declared.path, folder, python, most_bytes, None, within_s, LESS)
            failure = None
            try:
                await run_confined(self._level, [str(python.path), *arguments], task)
            except UvFailed as failed:
                failure = shorten(failed)
            folder.chmod(0o700)  # nobody but us exchanges what is in it from now on
            yield folder, failure
        finally:
            await asyncio.to_thread(remove_tree, folder)
            self.release(ref.key)

    async def _get_for_tool(
        self, declared: DeclaredPackages
    ) -> tuple[Interpreter, PackageEnvironment]:
        """An environment with these packages, in the versions of its first installation here, unless
        they cannot be installed any more. It stays until `release`. Raises Refused."""
        self._prepare()
        named = self._settings.pythons
        found = await asyncio.to_thread(
            choose_python, declared.requires_python, declared.path, named
        )
        asked = declared.model_copy(update={"path": "-"}).model_dump_json()
        place = f"{asked}\n{self._settings.index}\n{found.minor}\n{platform()}"
        kept = self._directory / f"{hashlib.sha256(place.encode()).hexdigest()}.versions"
        if (before := await asyncio.to_thread(_read_versions, kept)) is not None:
            with contextlib.suppress(Refused):  # the index may have other files for them now
                return await self._get_resolved(before)
        resolved = await self.resolve(declared)
        ready = await self._get_resolved(resolved)
        await asyncio.to_thread(_write_versions, kept, resolved)
        return ready

    async def _get_resolved(
        self, resolved: ResolvedPackages
    ) -> tuple[Interpreter, PackageEnvironment]:
        pins = resolved.pins.encode()
        lock = ArtifactRef(uri="-", sha256=hashlib.sha256(pins).hexdigest(), size=len(pins))
        ref = PackageEnvironment(
            key=resolved.key, lock=lock, python=resolved.python, platform=resolved.platform
        )
        return await self.get(ref, pins), ref

    def release(self, key: str) -> None:
        """End one use of an environment. It may be removed when it has none."""
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self._building.pop(key, None)  # nobody holds it, or waits for it
            if (use := self._used.pop(key, None)) is not None:
                use.close()

    def close(self) -> None:
        """Let unused environments be removed."""
        for use in self._used.values():
            use.close()
        self._used.clear()
        self._users.clear()

    async def _build_once(self, key: str, pins: str, base: Interpreter) -> None:
        check_pins(pins, "the lock of a rollout")
        lock = await _open_locked(self._directory / f"{key}.lock")
        try:
            if not has_directory(self._directory / key):
                await self._build(key, pins, base)
        finally:
            os.close(lock)
        await asyncio.to_thread(make_room, self._directory, self._settings.kept_bytes, keep=key)

    async def _build(self, key: str, pins: str, base: Interpreter) -> None:
        began, count = time.monotonic(), count_pins(pins)
        logger.info("installing %d packages into the environment %s", count, key[:12])
        await asyncio.to_thread(remove_partials, self._directory, key)
        folder = prepared_folder(self._directory, key)
        what = f"the environment with {count} package{'s' if count != 1 else ''}"
        try:
            await self._install(folder, pins, base, what)
            if os.geteuid() != 0:
                await self._seal_confined(folder, base, what)
            size = await asyncio.to_thread(_settle, folder, self._directory / key, what)
        except UvFailed as failed:
            error = self._refusal(failed, what, is_locked=True)
            raise (TransientError(error.message) if is_away(failed) else error) from failed
        finally:
            await asyncio.to_thread(remove_tree, folder)
        took = time.monotonic() - began
        logger.info("installed %d packages (%d MiB) in %.1f s", count, size >> 20, took)

    async def _install(self, folder: Path, pins: str, base: Interpreter, what: str) -> None:
        """Make an environment in `folder`. Packages run no code while they are installed. Once their
        files are there, the environment's own Python is not started: they may have replaced it."""
        uv, env = str(find_uv(self._directory)), folder / "env"
        (folder / "pins.txt").write_text(pins)
        most = self._settings.largest_bytes
        alone = UvTask(what, folder, base, most)
        await run_confined(
            self._level,
            [uv, "venv", "--quiet", "--relocatable", "--python", str(base.path), str(env)],
            alone,
        )
        if not count_pins(pins):
            return
        reserved = await asyncio.to_thread(take_reserved, env)
        install = (
            *(uv, "pip", "install", "--quiet", "--require-hashes", "--no-deps"),
            *("--python", str(env / "bin" / "python"), "--only-binary", ":all:", "-r", "pins.txt"),
            *index_options(self._settings.index),
        )
        async with self._way_out(what) as relay:
            await run_confined(self._level, install, UvTask(what, folder, base, most, relay))
        await asyncio.to_thread(check_reserved, folder, reserved, what)
        compiling = (str(base.path), "-I", "-S", "-m", "compileall", "-q", str(env / "lib"))
        try:
            await run_confined(self._level, compiling, alone)
        except UvFailed as failed:  # some packages hold files for other versions of Python
            logger.debug("not all files of an environment could be compiled: %s", failed)
        await asyncio.to_thread(check_reserved, folder, reserved, what)

    async def _seal_confined(self, folder: Path, base: Interpreter, what: str) -> None:
        """Make an environment read-only without the rights of the platform. User code has our own user
        here, so it can do that itself."""
        sealing = (str(base.path), "-I", "-S", "-c", SEAL, "env")
        task = UvTask(what, folder, base, self._settings.largest_bytes)
        with contextlib.suppress(UvFailed):  # whatever can still be written is refused next
            await run_confined(self._level, sealing, task)

    @asynccontextmanager
    async def _way_out(self, what: str) -> AsyncIterator[Path]:
        """The socket of a relay to the index. Raises UvFailed with the words of the relay, if it could
        not connect, and Refused when it may not."""
        settings = self._settings
        relay = IndexRelay(settings.index, hosts=settings.hosts, environ=os.environ)
        async with relay.listen(group=user_group()) as socket:
            try:
                yield socket
            except UvFailed as failed:
                if relay.refused is not None:
                    text = f"{what}: the packages cannot be installed: {relay.refused}"
                    raise Refused(text) from failed
                if relay.away is not None:
                    raise UvFailed(f"{relay.away}. {failed}", is_away=True) from failed
                raise

    def _prepare(self) -> None:
        if not self._directory.is_dir():
            self._directory.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
            self._directory.mkdir(exist_ok=True)
            self._directory.chmod(0o755)

    def _refusal(self, failed: UvFailed, path: str, *, is_locked: bool = False) -> Refused:
        if is_away(failed):
            index = self._settings.index or "the index of uv"
            return Refused(
                f"{path}: the packages cannot be installed, because {index} cannot be reached; try "
                f"again, or let the operator set {INDEX}. uv says: {shorten(failed)}"
            )
        return Refused(
            f"{path}: the packages cannot be installed; {advise(failed, is_locked=is_locked)}. uv "
            f"says: {shorten(failed)}"
        )


def _read_versions(kept: Path) -> ResolvedPackages | None:
    """The versions of an earlier installation. None if there was none, or if its file is damaged."""
    try:
        return ResolvedPackages.model_validate_json(kept.read_bytes())
    except (OSError, ValueError):
        return None


def _write_versions(kept: Path, resolved: ResolvedPackages) -> None:
    descriptor, scratch = tempfile.mkstemp(dir=kept.parent, suffix=".partial")
    os.close(descriptor)
    Path(scratch).write_text(resolved.model_dump_json())
    Path(scratch).replace(kept)


def _settle(folder: Path, place: Path, what: str) -> int:
    """Make the environment in `folder` ours and read-only, and move it to its place. Returns its bytes.
    Raises Refused for a tree that no environment has."""
    folder.chmod(0o700)  # nobody but us exchanges what is in it from now on
    remove_tree(folder / "cache")  # its files are those of the environment, by another name
    remove_tree(place)  # it is not a directory, or it would be used
    try:
        size, _ = measure_tree(folder / "env")
        with open_tree(folder / "env") as top:
            seal_tree(top, user_uids())
            move_tree(folder / "env", place, top=top)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Refused(f"{what} cannot be used: a package has exchanged its directory") from error
    except Refused as error:
        raise Refused(f"{what} cannot be used: {error.message}; leave out its cause") from error
    return size


def platform() -> str:
    """The name of this platform, as `linux-x86_64`."""
    return sysconfig.get_platform()


async def _open_locked(path: Path) -> int:
    """Open a lock file and wait until no other process has it. A thread could not be cancelled while it
    waits, and would keep the lock."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            await asyncio.sleep(LOCK_S)
    except BaseException:
        os.close(descriptor)
        raise
