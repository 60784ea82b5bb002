"""The canaries: a pretended platform outside of the sandbox. It holds secrets, and notices each change
that an attack makes to it."""

import contextlib
import ctypes
import hashlib
import os
import pty
import secrets
import shutil
import socket
import stat
import tempfile
import time
from pathlib import Path

from tests.escapes.attacks.attack import CLAIM, Targets
from tests.escapes.listeners import Listeners, addresses_of_machine
from tests.escapes.neighbour import Neighbour, python_of_victims

PLACES = (
    "environment of the platform",
    "environment of a neighbour",
    "memory of a neighbour",
    "open file of a neighbour",
    "anonymous file of a neighbour",
    "token file",
    "blob",
    "public file",
    "installed package",
    "program",
    "port or socket",
    "System V segment",
    "POSIX memory",
    "code of another rollout",
    "ground truth",
)
SETTINGS = ("/proc/sys/fs/inotify/max_queued_events", "/proc/sys/kernel/core_pattern")
SHARED = (
    "/tmp",
    "/var/tmp",
    "/dev/shm",
    "/run",
    "/",
    "/etc",
    "/etc/cron.d",
    "/etc/profile.d",
    "/root",
)
ENVIRONMENTS = "environments"
"""The directory of the environments of rollouts, below the one for temporary files."""

IPC_CREATE, IPC_REMOVE = 0o1000, 0

libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
libc.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
libc.shmdt.argtypes = [ctypes.c_void_p]


class Outside:
    """Everything outside that an attack could reach. `secrets` maps a place to the secret there."""

    def __init__(self, token: str, environment_secret: str) -> None:
        self.token = token
        self.mark = f"mark-{token}-"
        self.secrets = {place: self.mark + secrets.token_hex(8) for place in PLACES}
        self.secrets["environment of the platform"] = environment_secret
        self._temporary = Path(tempfile.gettempdir())
        self._directory = Path(tempfile.mkdtemp(prefix="canaries-"))
        self.home = self._directory / "home"
        self._others = self._directory / "others"
        self.neighbour_tree = self._directory / "neighbour-tree"
        self._write_files()
        self._before = self._files()
        self._listeners = Listeners(
            self._others / "database.sock", f"canary-{token}", self.secrets["port or socket"]
        )
        self._key = int(token, 16) % (1 << 30) & ~1 | 1 << 30
        self._segment = libc.shmget(self._key, 4096, IPC_CREATE | 0o666)
        self._shm_name = f"canary-{token}"
        self._write_shared()
        self._master, self._terminal = pty.openpty()
        os.set_blocking(self._master, False)
        Path(os.ttyname(self._terminal)).chmod(0o666)
        self.other_path, self.other_key = "", ""
        self._settings = {name: _text(name) for name in SETTINGS}
        self._host = socket.gethostname()
        self._python = python_of_victims()
        self._neighbour = self._new_neighbour()
        self._code = self._code_files()

    def targets(self) -> Targets:
        """What attacks are told."""
        return Targets(
            token=self.token,
            mark=self.mark,
            victim=self._neighbour.pid,
            address=self._neighbour.address,
            length=self._neighbour.length,
            parent=os.getpid(),
            outside=str(self._others),
            home=str(self.home),
            socket=str(self._others / "database.sock"),
            abstract=f"canary-{self.token}",
            tcp=self._listeners.tcp,
            udp=self._listeners.udp,
            addresses=addresses_of_machine(),
            shm_key=self._key,
            shm_name=self._shm_name,
            terminal=os.ttyname(self._terminal),
            temporary=str(self._temporary),
            neighbour_tree=str(self.neighbour_tree),
            own_ports=[],
            other_path=self.other_path,
            other_key=self.other_key,
        )

    def loot(self, text: str, *, may: tuple[str, ...] = ()) -> list[str]:
        """The effects that an answer shows: secrets in it, and what it claims. `may` are the kinds of
        claims that are no effect at this level."""
        found = [f"it read the secret: {place}" for place, s in self.secrets.items() if s in text]
        claims = [line[len(CLAIM) :] for line in text.splitlines() if line.startswith(CLAIM)]
        return found + [f"claim: {said}" for said in claims if not said.startswith(may or "\0")]

    def watch_code(self) -> None:
        """Take the directories with unpacked code and packages as they are now for unchanged."""
        self._code = self._code_files()

    def changes(self) -> list[str]:
        """The effects since the last time. What was changed is put right again."""
        found = self._listeners.take() + self._neighbour.changes() + self._file_changes()
        if self._neighbour.changes():
            self._neighbour.end()
            self._neighbour = self._new_neighbour()
        code = self._code_files()
        for path in sorted(self._code.keys() | code.keys()):
            if self._code.get(path) != code.get(path):
                found.append(f"code changed: {path.relative_to(self._temporary)}")
        self._code = code
        return found + self._shared_changes() + self._machine_changes() + self._names()

    def reach_in(self, name: str) -> list[str]:
        """Whether somebody outside can connect to what an attack listens on.

        Only an answer with the attack's own text counts: the port may be that of another process of
        this machine by then, and a connection to a free port of 127.0.0.1 may reach itself.
        """
        answer = f"escape-{self.token}-{name}".encode()
        addresses: tuple[tuple[int, object], ...] = (
            (socket.AF_INET, ("127.0.0.1", self._listeners.tcp + 1)),
            (socket.AF_UNIX, f"\0escape-{self.token}-{name}"),
        )
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            for family, address in addresses:
                with socket.socket(family, socket.SOCK_STREAM) as talking:
                    talking.settimeout(0.2)
                    with contextlib.suppress(OSError):
                        talking.connect(address)  # type: ignore[arg-type]  # of each family
                        if talking.recv(len(answer), socket.MSG_WAITALL) == answer:
                            return [f"a port of the sandbox is reached from outside: {address!r}"]
            time.sleep(0.02)
        return []

    def survivors(self) -> dict[int, str]:
        """The processes of attacks that are alive: process id -> attack."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                line = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
                _, is_one, name = line.partition(f"escape-{self.token}-")
                if is_one:
                    found[int(entry.name)] = name.split()[0]
        return found

    def close(self) -> None:
        """Remove everything, also what attacks left."""
        self._neighbour.end()
        self._listeners.close()
        self._names()
        libc.shmctl(self._segment, IPC_REMOVE, None)
        with contextlib.suppress(OSError):
            Path(f"/dev/shm/{self._shm_name}").unlink()
        os.close(self._master)
        os.close(self._terminal)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _new_neighbour(self) -> Neighbour:
        private = Path(tempfile.mkdtemp(dir=self._directory))
        private.chmod(0o777)
        return Neighbour(private, self._python, self.secrets)

    def _write_files(self) -> None:
        self._directory.chmod(0o755)
        for folder in (self.home, self._others, self.neighbour_tree):
            folder.mkdir()
        (self.home / "blobs").mkdir()
        (self._others / "environment").mkdir()
        (self._others / "removable").mkdir()
        files = {
            self.home / "token": "token file",
            self.home / "blobs" / "adapter": "blob",
            self._others / "public": "public file",
            self._others / "removable" / "file": "",
            self._others / "environment" / "package.py": "installed package",
            self.neighbour_tree / "main.py": "code of another rollout",
        }
        for path, place in files.items():
            path.write_text(f"# {self.secrets.get(place, '')}\n")
        (self.home / "token").chmod(0o600)
        self.neighbour_tree.chmod(0o750)
        program = self._others / "private-program"
        program.write_text(f"#!/bin/sh\necho {self.secrets['program']}\n")
        program.chmod(0o700)
        shutil.copy("/usr/bin/id", self._others / "root-id")
        (self._others / "root-id").chmod(0o4755)

    def _files(self) -> dict[Path, tuple[int, bytes]]:
        found = {}
        for top in (self.home, self._others, self.neighbour_tree):
            for path in (top, *sorted(top.rglob("*"))):
                mode = path.lstat().st_mode
                if not stat.S_ISSOCK(mode):
                    data = path.read_bytes() if stat.S_ISREG(mode) else b""
                    found[path] = mode, data
        return found

    def _file_changes(self) -> list[str]:
        now = self._files()
        if now == self._before:
            return []
        changed = [p for p in now.keys() | self._before.keys() if now.get(p) != self._before.get(p)]
        for path in sorted(now.keys() - self._before.keys(), reverse=True):
            path.unlink() if not path.is_dir() or path.is_symlink() else path.rmdir()
        for path, (mode, data) in self._before.items():
            if stat.S_ISDIR(mode):
                path.mkdir(exist_ok=True)
            elif now.get(path) != (mode, data):
                path.write_bytes(data)
            path.chmod(stat.S_IMODE(mode))
        return [f"a file changed: {p.relative_to(self._directory)}" for p in sorted(changed)]

    def _write_shared(self) -> None:
        place = libc.shmat(self._segment, None, 0)
        data = self.secrets["System V segment"].encode().ljust(256, b"\0")
        ctypes.memmove(place, data, len(data))
        libc.shmdt(place)
        path = Path(f"/dev/shm/{self._shm_name}")
        path.write_text(self.secrets["POSIX memory"])
        path.chmod(0o666)

    def _shared_changes(self) -> list[str]:
        found = []
        if libc.shmget(self._key, 0, 0) != self._segment:
            found.append("a System V segment was removed")
            self._segment = libc.shmget(self._key, 4096, IPC_CREATE | 0o666)
        else:
            place = libc.shmat(self._segment, None, 0)
            data = ctypes.string_at(place, 256).rstrip(b"\0")
            libc.shmdt(place)
            if data != self.secrets["System V segment"].encode():
                found.append("a System V segment changed")
        path = Path(f"/dev/shm/{self._shm_name}")
        if not path.exists() or path.read_text() != self.secrets["POSIX memory"]:
            found.append("POSIX memory changed")
        if found:
            self._write_shared()
        for name, get, control in (
            ("segment", libc.shmget, libc.shmctl),
            ("queue", libc.msgget, libc.msgctl),
            ("semaphore", libc.semget, libc.semctl),
        ):
            arguments = (self._key + 1, 0) if name == "queue" else (self._key + 1, 0, 0)
            if (left := get(*arguments)) >= 0:
                found.append(f"a System V {name} was left")
                control(left, *((0, IPC_REMOVE) if name == "semaphore" else (IPC_REMOVE, None)))
        return found

    def _machine_changes(self) -> list[str]:
        found = [f"{n} changed" for n, text in self._settings.items() if _text(n) != text]
        for name, text in self._settings.items():
            if _text(name) != text:
                Path(name).write_text(text)
        if socket.gethostname() != self._host:
            found.append("the machine's name changed")
            socket.sethostname(self._host)
        with contextlib.suppress(BlockingIOError, OSError):
            found.append(f"the terminal shows {os.read(self._master, 200)!r}")
        return found

    def _code_files(self) -> dict[Path, str]:
        """The unpacked code of all rollouts, the SDK, and the environments."""
        found = {}
        environments = (self._temporary / ENVIRONMENTS).glob("?" * 64)
        for top in (*self._temporary.glob("headrace-code-*"), *environments):
            if top.is_symlink():
                continue
            for path in (p for p in top.rglob("*") if p.is_file() or p.is_symlink()):
                with contextlib.suppress(OSError):
                    data = b"" if path.is_symlink() else path.read_bytes()
                    mode = path.lstat().st_mode
                    found[path] = hashlib.sha256(data).hexdigest() + f"{mode:o}"
        return found

    def _names(self) -> list[str]:
        """The files with this harness's token in their names. They are removed."""
        found = []
        for folder in {*SHARED, str(self._temporary), str(self.home), str(self._others)}:
            with contextlib.suppress(OSError):
                for name in os.listdir(folder):  # noqa: PTH208 - only the names
                    if self.token in name and not name.startswith("canary-"):
                        found.append(f"a file was left: {folder}/{name}")
                        _remove(Path(folder) / name)
        return found


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _text(name: str) -> str:
    try:
        return Path(name).read_text()
    except OSError:
        return ""
