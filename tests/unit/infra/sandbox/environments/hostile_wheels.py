"""The corpus of hostile wheels. Each is installed harmlessly or refused by name, and nothing outside
changes.

`python -m tests.unit.infra.sandbox.environments.hostile_wheels` installs all of them as the user that it
runs as, and prints a JSON object, wheel -> problems. With the program of a Python, it installs those
that aim at the start of one, for that one.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import stat
import struct
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from infra.ports.packages import DeclaredPackages
from infra.sandbox.environments import uv_process
from infra.sandbox.environments.environments import PackageEnvironments
from infra.sandbox.environments.interpreters import ask, reachable_python
from infra.sandbox.environments.uv_process import UvTask, run_confined
from infra.sandbox.interpreter import Interpreter
from infra.sandbox.levels.probe import choose_level
from infra.settings.packages import PackageSettings
from schemas.artifact_refs import ArtifactRef
from schemas.errors import Refused
from schemas.specs import PackageEnvironment
from tests.kit.package_index import LocalIndex, serve_index

MINORS = range(11, 15)
"""The versions of Python whose standard library a wheel brings along, whichever one is used."""

AT_ONCE = 4
LATER_S = 0.1
VICTIM = "VICTIM"
SWAP = f"import posix\nposix.rename('env', 'moved')\nposix.symlink('{VICTIM}', 'env')\n"
"""What code in the sandbox would do: exchange the environment for a link to the platform's files."""

DATA = "evil-1.0.data/data"
SCRIPTS = "evil-1.0.data/scripts"
INFO = "evil-1.0.dist-info"
HARMLESS = ""
LINK, PIPE, DEVICE = stat.S_IFLNK | 0o777, stat.S_IFIFO | 0o644, stat.S_IFBLK | 0o644


@dataclass(frozen=True)
class Wheel:
    """A wheel: its files, a part of what refuses it (HARMLESS: nothing), and the modes of files. If it
    found a way to run code while it is installed, that would be `code`."""

    files: dict[str, str]
    says: str = HARMLESS
    modes: dict[str, int] = field(default_factory=dict)
    code: str = ""


def running(code: str, says: str = HARMLESS) -> Wheel:
    """A wheel whose code runs in the sandbox after its files were checked. What fails is ignored."""
    lines = "".join(f"    {line}\n" for line in code.splitlines())
    head = "import contextlib, ctypes, os, socket, time\nfrom pathlib import Path\n"
    return Wheel({}, says, code=f"{head}with contextlib.suppress(OSError):\n{lines}")


def own_library(home: str) -> dict[str, str]:
    """A standard library that runs SWAP when Python starts, for all versions."""
    files = {f"{DATA}/evil/bin/x": "", f"{DATA}/pyvenv.cfg": f"home = {home}\n"}
    for minor in MINORS:
        below = f"{DATA}/evil/lib/python3.{minor}"
        files |= {f"{below}/{name}": SWAP for name in ("os.py", "encodings/__init__.py", "site.py")}
        files[f"{below}/lib-dynload/x"] = ""
    return files


def in_site(name: str, text: str) -> dict[str, str]:
    return {f"{DATA}/lib/python3.{minor}/site-packages/{name}": text for minor in MINORS}


def entry_point(line: str) -> dict[str, str]:
    return {f"{INFO}/entry_points.txt": f"[console_scripts]\n{line}\n"}


ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
ALL = 0xFFFFFFFF
LIST = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", tag, 7, ALL) for tag in (1, 4, 0x10, 0x20)
)
"""An access list that allows everything."""

CAPABILITIES = struct.pack("<IIIII", 0x02000001, ALL, 0, ALL, 0)
NAMED = "evil==1.0 writes"
UV = "evil==1.0"
PROGRAM = "#!/bin/sh\n"
WHEELS = {
    "its own configuration and library": Wheel(own_library("env/evil/bin"), NAMED),
    "a configuration beside the program": Wheel({f"{DATA}/bin/pyvenv.cfg": "home = /x\n"}, NAMED),
    "an empty configuration": Wheel({f"{DATA}/pyvenv.cfg": ""}, NAMED),
    "a configuration among the scripts": Wheel({f"{SCRIPTS}/pyvenv.cfg": "home = /x\n"}, NAMED),
    "an empty record": Wheel({f"{DATA}/pyvenv.cfg": "", f"{INFO}/RECORD": ""}, NAMED),
    "the program python": Wheel({f"{DATA}/bin/python": PROGRAM}, UV),
    "the program python3": Wheel({f"{DATA}/bin/python3": PROGRAM}, UV),
    "the program of another version": Wheel({f"{DATA}/bin/python3.99": PROGRAM}, UV),
    "a search path of the program": Wheel({f"{DATA}/bin/python._pth": "/x\n"}, NAMED),
    "a script python": Wheel({f"{SCRIPTS}/python": "#!python\n"}, UV),
    "an entry point python": Wheel(entry_point("python=a:b"), UV),
    "an entry point outside": Wheel(entry_point("../../x=a:b"), UV),
    "a file lib64": Wheel({f"{DATA}/lib64": "x"}, NAMED),
    "a link lib64": Wheel({f"{DATA}/lib64": VICTIM}, NAMED, {f"{DATA}/lib64": LINK}),
    "files below lib64": Wheel({f"{DATA}/lib64/x": "x"}),
    "a file lib": Wheel({f"{DATA}/lib": "x"}, UV),
    "a link": Wheel({"evil/away": VICTIM}, HARMLESS, {"evil/away": LINK}),
    "a link and a file below it": Wheel(
        {"evil/away": VICTIM, "evil/away/secret": "x"}, "evil", {"evil/away": LINK}
    ),
    "a pipe": Wheel({"evil/pipe": ""}, HARMLESS, {"evil/pipe": PIPE}),
    "a device": Wheel({"evil/sda": ""}, HARMLESS, {"evil/sda": DEVICE}),
    "names of devices": Wheel({f"{DATA}/dev/null": "x", f"{DATA}/proc/self/mem": "x"}),
    "a program with setuid": Wheel({"evil/su": PROGRAM}, HARMLESS, {"evil/su": 0o106755}),
    "a file that nobody may read": Wheel(
        {"evil/none.py": ""}, HARMLESS, {"evil/none.py": 0o100000}
    ),
    "a file above its place": Wheel({"../../../evil.py": SWAP}),
    "an absolute file": Wheel({f"/{VICTIM}/secret": "x", f"/{VICTIM}/more": "x"}),
    "data above its place": Wheel({f"{DATA}/../../../../../up": "x"}),
    "a record of files elsewhere": Wheel({f"{INFO}/RECORD": f"{VICTIM}/secret,,\n../../x,,\n"}),
    "lines that site runs": Wheel({"evil.pth": f"import posix; posix.unlink('{VICTIM}/secret')\n"}),
    "modules that site imports": Wheel({"sitecustomize.py": SWAP, "usercustomize.py": SWAP}),
    "modules of the standard library": Wheel({"os.py": SWAP, "encodings/__init__.py": SWAP}),
    "a compiler": Wheel({"compileall.py": SWAP, "py_compile.py": SWAP, "runpy.py": SWAP}),
    "site-packages by data": Wheel(in_site("sitecustomize.py", SWAP)),
    "names that differ in case": Wheel({"A.py": "", "a.py": "", "a/__init__.py": ""}),
    "a configuration in capitals": Wheel({f"{DATA}/PYVENV.CFG": "home = /x\n"}),
    "names in other scripts": Wheel({"evil/\u202ey\u0440.py": ""}, UV),
    "a name that looks like python": Wheel({f"{DATA}/bin/pyth\u043en3": PROGRAM}),
    "a name with a line feed": Wheel({"evil/a\nb.py": "x = 1\n"}, UV),
    "code that cannot be compiled": Wheel({"evil/deep.py": f"x = {'(' * 5000}{')' * 5000}\n"}),
    "directories inside each other": Wheel({f"{'d/' * 100}x.py": ""}, "deeper than"),
    "a pipe by code": running("os.mkfifo('env/pipe')", "is not a file"),
    "a socket by code": running(
        "socket.socket(socket.AF_UNIX).bind('env/socket')", "is not a file"
    ),
    "a device by code": running("os.mknod('env/sda', 0o60666, os.makedev(8, 0))"),
    "a second name": running("os.link('env/bin/activate', 'env/other')", "more than one name"),
    "a second name of a file outside": running(f"os.link('{VICTIM}/secret', 'env/secret')"),
    "a second name of a program": running("os.link('/usr/bin/env', 'env/program')"),
    "a mount": running(
        "os.mkdir('env/mount')\n"
        f"ctypes.CDLL(None).mount(b'{VICTIM}', b'env/mount', None, 4096, None)"
    ),
    "rights by code": running(
        "for place in Path('env').rglob('*'):\n"
        "    if place.stat().st_uid == os.geteuid() and not place.is_symlink():\n"
        "        place.chmod(0o7777)"
    ),
    "access lists": running(f"os.setxattr('env/bin', {ACCESS!r}, {LIST!r})"),
    "a default access list": running(f"os.setxattr('env/bin', {DEFAULT!r}, {LIST!r})"),
    "capabilities": running(
        "Path('env/tool').touch()\n"
        f"os.setxattr('env/tool', 'security.capability', {CAPABILITIES!r})"
    ),
    "a link in place of the environment": running(SWAP, "has exchanged its directory"),
    "a file in place of the environment": running(
        "os.rename('env', 'moved')\nPath('env').touch()", "has exchanged its directory"
    ),
    "no environment": running("os.rename('env', 'moved')", "has exchanged its directory"),
    "a daemon that goes on": running(
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    for descriptor in range(3):\n"
        "        os.close(descriptor)\n"
        "    folder = os.open('env', os.O_RDONLY)\n"
        "    while True:\n"
        "        name = str(time.monotonic_ns())\n"
        "        os.close(os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=folder))\n"
        "        os.rename(name, 'late', src_dir_fd=folder, dst_dir_fd=folder)\n"
        "while not os.path.exists('env/late'):\n"
        "    time.sleep(0.01)"
    ),
    "a large file": Wheel({"evil/large": "0" * (24 << 20)}, "needs more than 16 MiB"),
}


AIMED = (
    "its own configuration and library",
    "a search path of the program",
    "lines that site runs",
    "modules of the standard library",
    "a compiler",
    "site-packages by data",
)
"""The wheels that aim at the start of a Python, which versions do differently."""


class Machine:
    """A machine with something of the platform (`victim`), and environments from an index."""

    def __init__(self, root: Path, index: LocalIndex, python: str = "") -> None:
        self.victim = root / "victim"
        self.victim.mkdir(mode=0o700)
        (self.victim / "secret").write_text("secret")
        (self.victim / "secret").chmod(0o600)
        if os.geteuid() == 0:
            os.chown(self.victim / "secret", 4321, 4321)
        self.directory = root / "environments"
        self.index = index
        named = (Path(python),) if python else ()
        settings = PackageSettings(
            self.directory, index=index.url, pythons=named, largest_bytes=16 << 20
        )
        chosen = [python.minor for python in map(ask, named) if python is not None]
        self.requires_python = f"=={chosen[0]}.*" if chosen else ""
        self.environments = PackageEnvironments(choose_level("bwrap"), settings)

    def look(self) -> object:
        """What is outside of the environments, with its modes, owners and bytes."""
        places = (self.directory.parent, self.victim, self.victim / "secret")
        told = [path.lstat() for path in places]
        names = [sorted(path.name for path in place.iterdir()) for place in places[:2]]
        names[0] = [name for name in names[0] if name != self.directory.name]
        modes = [(t.st_mode, t.st_uid, t.st_gid) for t in told]
        return modes, names, (self.victim / "secret").read_bytes()

    async def install(self, wheel: Wheel) -> Path:
        """Publish a wheel and build an environment with it. Returns the environment."""
        place = str(self.victim)
        files = {
            name.replace(VICTIM, place[1:]): text.replace(VICTIM, place)
            for name, text in wheel.files.items()
        }
        self.index.add_wheel("evil", "1.0", files=files, modes=wheel.modes)
        declared = DeclaredPackages(
            path="p", dependencies=("evil",), requires_python=self.requires_python
        )
        resolved = await self.environments.resolve(declared)
        pins = resolved.pins.encode()
        lock = ArtifactRef(uri="m:", sha256=hashlib.sha256(pins).hexdigest(), size=len(pins))
        ref = PackageEnvironment(
            key=resolved.key, lock=lock, python=resolved.python, platform=resolved.platform
        )
        self._run_at_the_end(wheel.code.replace(VICTIM, place))
        python = await self.environments.get(ref, pins)
        return python.path.parents[1]

    def _run_at_the_end(self, code: str) -> None:
        """Have code run in the sandbox when all files of an environment are there and were checked."""
        environments = self.environments
        install = environments._install

        async def run_too(folder: Path, pins: str, base: Interpreter, what: str) -> None:
            await install(folder, pins, base, what)
            program = [str(base.path), "-I", "-S", "-c", code]
            await run_confined(environments._level, program, UvTask(what, folder, base, 16 << 20))

        if code:
            environments._install = run_too  # type: ignore[method-assign]  # on this machine only


def unusual(env: Path) -> list[str]:
    """What others may write in an environment, what has rights of its own, and what is not a file."""
    found = []
    for path in [env, *env.rglob("*")]:
        told = path.lstat()
        kind = stat.S_IFMT(told.st_mode)
        may_more = kind != stat.S_IFLNK and told.st_mode & 0o7022
        is_usual = kind in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
        has_more = set(os.listxattr(path, follow_symlinks=False)) & {"security.capability"}
        if may_more or has_more or not is_usual or told.st_uid != os.geteuid():
            found.append(f"{path.relative_to(env)}: {told.st_mode:o} of {told.st_uid}")
    return found


def links(env: Path) -> set[str]:
    """The links of an environment, but for those to its Python."""
    found = {path.relative_to(env).as_posix() for path in env.rglob("*") if path.is_symlink()}
    return {place for place in found if not place.startswith("bin/python")}


@contextlib.contextmanager
def open_machine(python: str = "") -> Iterator[Machine]:
    """A new machine, until the block ends. Its environments are for `python`, or for the default."""
    with tempfile.TemporaryDirectory(prefix="headrace-test-", ignore_cleanup_errors=True) as place:
        root = Path(place)
        root.chmod(0o755)
        (root / "machine").mkdir()
        with serve_index(root / "index") as index:
            made = Machine(root / "machine", index, python)
            yield made
            made.environments.close()


async def find_problems(machine: Machine, wheel: Wheel) -> list[str]:
    """Install a wheel. Returns how its answer differs from the right one, and its effects outside."""
    before, problems = machine.look(), []
    try:
        env = await machine.install(wheel)
    except Refused as refused:
        if wheel.says == HARMLESS or wheel.says not in str(refused):
            problems.append(f"it was refused: {refused}")
        if list(machine.directory.glob("?" * 64)):
            problems.append("there is an environment although it was refused")
    else:
        problems += unusual(env) + sorted(links(env) - {"lib64"})
        if wheel.says != HARMLESS or env.is_symlink():
            problems.append("it was installed")
        changed = env.lstat().st_ctime_ns
        await asyncio.sleep(LATER_S)
        if env.lstat().st_ctime_ns != changed:
            problems.append("it still changes")
    if machine.look() != before:
        problems.append(f"outside was {before}, and is {machine.look()}")
    if left := list(machine.directory.glob("*.partial")):
        problems.append(f"{left} is left")
    return problems


async def install_all(python: str = "") -> dict[str, list[str]]:
    """Install all wheels, each on a machine of its own. Returns the problems of each."""
    places = asyncio.Semaphore(AT_ONCE)
    names = AIMED if python else tuple(WHEELS)
    if (found := ask(Path(python)) if python else None) is not None:
        copied = Path(tempfile.mkdtemp())  # once for all machines, in the place of this corpus
        copied.chmod(0o755)
        python = str(reachable_python(found, copied).path)

    async def install(wheel: Wheel) -> list[str]:
        async with places:
            with open_machine(python) as machine:
                return await find_problems(machine, wheel)

    problems = await asyncio.gather(*(install(WHEELS[name]) for name in names))
    return dict(zip(names, problems, strict=True))


def main() -> None:
    """Print the problems of all wheels."""
    uv_process.RETRIES = 0
    with contextlib.redirect_stdout(sys.stderr):
        found = asyncio.run(install_all(*sys.argv[1:]))
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
