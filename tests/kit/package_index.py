"""A package index of this machine: wheels that a test writes, served over HTTP on loopback."""

import base64
import contextlib
import hashlib
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any


def _ignore(path: str) -> None:
    """Do nothing."""


class _Handler(SimpleHTTPRequestHandler):
    def __init__(self, *arguments: Any, index: "LocalIndex", directory: str) -> None:
        self._index = index
        super().__init__(*arguments, directory=directory)

    def do_GET(self) -> None:
        self._index.on_request(self.path)
        super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class LocalIndex:
    """An index below a directory. Projects are added at any time. `on_request` is called with the path
    of each file before it is sent."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.url = ""
        self.on_request: Callable[[str], None] = _ignore

    def add_wheel(
        self,
        name: str,
        version: str,
        *,
        files: Mapping[str, str | bytes] | None = None,
        requires: Sequence[str] = (),
        tag: str = "py3-none-any",
        padding: int = 0,
        modes: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Write a wheel of a project with one module of its name, or with `files`, which may replace the
        wheel's own records. `modes` are the types and permissions that it gives to files."""
        module = name.replace("-", "_")
        info = f"{module}-{version}.dist-info"
        texts: Mapping[str, str | bytes] = files or {f"{module}.py": f'VERSION = "{version}"\n'}
        needed = "".join(f"Requires-Dist: {line}\n" for line in requires)
        texts = {
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}",
            f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
            **texts,
        }
        if padding:
            texts = {**texts, f"{module}_data.bin": "0" * padding}
        record = "".join(f"{path},{_digest(text)},{len(text)}\n" for path, text in texts.items())
        texts = {f"{info}/RECORD": f"{record}{info}/RECORD,,\n", **texts}
        place = self._project(name) / f"{module}-{version}-{tag}.whl"
        with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED) as wheel:
            for path, text in texts.items():
                entry = zipfile.ZipInfo(path)
                entry.compress_type = zipfile.ZIP_DEFLATED
                entry.create_system, entry.external_attr = 3, modes.get(path, 0o100644) << 16
                wheel.writestr(entry, text)
        self._list(name)

    def add_source(self, name: str, version: str) -> None:
        """Add a project that has no wheel."""
        (self._project(name) / f"{name}-{version}.tar.gz").write_bytes(b"not read")
        self._list(name)

    def _project(self, name: str) -> Path:
        place = self._root / "simple" / name
        place.mkdir(parents=True, exist_ok=True)
        return place

    def _list(self, name: str) -> None:
        place = self._project(name)
        links = "".join(
            f'<a href="{file.name}#sha256={_hash(file)}">{file.name}</a>\n'
            for file in sorted(place.iterdir())
            if file.name != "index.html"
        )
        (place / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")


@contextlib.contextmanager
def serve_index(root: Path) -> Iterator[LocalIndex]:
    """Serve an index until the block ends."""
    (root / "simple").mkdir(parents=True)
    index = LocalIndex(root)
    handler = partial(_Handler, index=index, directory=str(root))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    index.url = f"http://127.0.0.1:{server.server_port}/simple"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield index
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _digest(text: str | bytes) -> str:
    digest = hashlib.sha256(text.encode() if isinstance(text, str) else text).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
