"""Hostile wheels are installed harmlessly or refused by name, and nothing outside changes."""

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from infra.ports.packages import DeclaredPackages
from infra.sandbox.environments.environments import Environments
from infra.sandbox.levels.probe import choose_level
from infra.settings.packages import PackageSettings
from schemas.errors import Refused
from schemas.sampling import ArtifactRef
from schemas.specs import EnvironmentRef
from tests.kit.package_index import LocalIndex, serve_index

MINORS = range(11, 15)
"""The versions of Python whose standard library a wheel brings along, whichever one is used."""

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
    """A wheel: its files, a part of what refuses it (HARMLESS: nothing), and the modes of files."""

    files: dict[str, str]
    says: str = HARMLESS
    modes: dict[str, int] = field(default_factory=dict)


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
    "a large file": Wheel({"evil/large": "0" * (24 << 20)}, "needs more than 16 MiB"),
}


@pytest.fixture(autouse=True)
def _no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.sandbox.environments.uv_process.RETRIES", 0)


class Machine:
    """A machine with something of the platform (`victim`), and environments from an index."""

    def __init__(self, root: Path, index: LocalIndex) -> None:
        self.victim = root / "victim"
        self.victim.mkdir(mode=0o700)
        (self.victim / "secret").write_text("secret")
        (self.victim / "secret").chmod(0o600)
        if os.geteuid() == 0:
            os.chown(self.victim / "secret", 4321, 4321)
        self.directory = root / "environments"
        self.index = index
        settings = PackageSettings(self.directory, index=index.url, largest_bytes=16 << 20)
        self.environments = Environments(choose_level("bwrap"), settings)

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
        declared = DeclaredPackages(path="p", dependencies=("evil",))
        resolved = await self.environments.resolve(declared)
        pins = resolved.pins.encode()
        lock = ArtifactRef(uri="m:", sha256=hashlib.sha256(pins).hexdigest(), size=len(pins))
        ref = EnvironmentRef(
            key=resolved.key, lock=lock, python=resolved.python, platform=resolved.platform
        )
        python = await self.environments.get(ref, pins)
        return python.path.parents[1]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    root = Path(tempfile.mkdtemp(prefix="headrace-test-"))
    root.chmod(0o755)
    with serve_index(tmp_path / "index") as index:
        made = Machine(root, index)
        yield made
        made.environments.close()
    shutil.rmtree(root)


def unusual(env: Path) -> list[str]:
    """What others may write in an environment, what has rights of its own, and what is not a file."""
    found = []
    for path in [env, *env.rglob("*")]:
        told = path.lstat()
        kind = stat.S_IFMT(told.st_mode)
        may_more = kind != stat.S_IFLNK and told.st_mode & 0o7022
        is_usual = kind in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
        if may_more or not is_usual or told.st_uid != os.geteuid():
            found.append(f"{path.relative_to(env)}: {told.st_mode:o} of {told.st_uid}")
    return found


def links(env: Path) -> set[str]:
    """The links of an environment, but for those to its Python."""
    found = {path.relative_to(env).as_posix() for path in env.rglob("*") if path.is_symlink()}
    return {place for place in found if not place.startswith("bin/python")}


def test_the_corpus_is_large() -> None:
    assert len(WHEELS) >= 40


@pytest.mark.parametrize("name", WHEELS)
async def test_a_hostile_wheel_has_its_answer_and_no_effect(machine: Machine, name: str) -> None:
    wheel, before = WHEELS[name], machine.look()
    if wheel.says == HARMLESS:
        env = await machine.install(wheel)
        assert not env.is_symlink()
        assert unusual(env) == []
        assert links(env) == {"lib64"}
    else:
        with pytest.raises(Refused) as refused:
            await machine.install(wheel)
        assert wheel.says in str(refused.value)
        assert not list(machine.directory.glob("?" * 64))
    assert machine.look() == before
    assert not list(machine.directory.glob("*.partial"))


async def test_without_the_check_a_package_chooses_the_python(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: the package's configuration stays, although its code did not run."""
    monkeypatch.setattr("infra.sandbox.environments.environments.check_reserved", lambda *_: None)
    before = machine.look()
    env = await machine.install(WHEELS["its own configuration and library"])
    assert (env / "pyvenv.cfg").read_text() == "home = env/evil/bin\n"
    assert machine.look() == before
