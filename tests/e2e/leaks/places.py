"""The places of a platform in which a secret could be found after a run."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg

from infra.operations.local import embedded_postgres
from producers.http.app import RESOURCES
from producers.http.routes import platform as platform_routes
from producers.http.routing import ScopedRoute
from tests.kit.otlp import Collector
from tests.kit.platform import Platform

OURS = ("producers.", "consumers", "infra.sandbox.service", "postgres", "headrace up")
"""Parts of the command lines of the platform's own processes."""


@dataclass(frozen=True)
class Looked:
    """A finished run of a platform, and what is needed to look at all that it left behind."""

    platform: Platform
    root: Path
    temporary: Path
    run: str
    evaluation: str
    collector: Collector
    effects: frozenset[str]
    """Every effect that was seen while the run worked. Later there are none."""

    def command(self, *arguments: str) -> bytes:
        """What a command prints, whether it succeeds or not."""
        done = subprocess.run(
            [sys.executable, "-m", "producers.cli.main", *arguments],
            env={**self.platform.environment, "COLUMNS": "400"},
            cwd=self.root,
            capture_output=True,
            check=False,
        )
        return done.stdout + done.stderr

    def get(self, path: str) -> bytes:
        return self.platform.api.get(path).content


def tables(home: Path) -> Mapping[str, bytes]:
    """Every table of the database as text. Binary columns are hex, which the needles know."""

    async def read() -> Mapping[str, bytes]:
        connection = await asyncpg.connect(embedded_postgres.place_for(home).url)
        try:
            names = await connection.fetch(
                "select schemaname || '.' || tablename as name from pg_tables"
                " where schemaname not in ('pg_catalog', 'information_schema')"
            )
            found = {}
            for row in names:
                rows = await connection.fetch(f"select t::text as line from {row['name']} t")
                found[row["name"]] = "\n".join(each["line"] for each in rows).encode()
            return found
        finally:
            await connection.close()

    return asyncio.run(read())


def waiting_effects(home: Path) -> frozenset[str]:
    """The effects as they are now, as text."""

    async def read() -> frozenset[str]:
        connection = await asyncpg.connect(embedded_postgres.place_for(home).url)
        try:
            rows = await connection.fetch("select t::text as line from effects t")
            return frozenset(row["line"] for row in rows)
        finally:
            await connection.close()

    return asyncio.run(read())


def routes(looked: Looked) -> Iterator[tuple[str, bytes]]:
    """The answer of every GET route, with the names of this run filled in."""
    checkpoint = f"{looked.run}@last"
    named = {
        "/runs/": looked.run,
        "/evals/": looked.evaluation,
        "/datasets/": "rows",
        "/checkpoints/": checkpoint,
        "/workspaces/": "w",
    }
    for route in [one for resource in RESOURCES for one in resource.ROUTES]:
        if not isinstance(route, ScopedRoute) or "GET" not in (route.methods or ()):
            continue
        ref = next((ref for prefix, ref in named.items() if route.path.startswith(prefix)), "none")
        path = route.path.replace("{ref}", ref).replace("{id}", "none")
        path = path.replace("{name:path}", "adapter_config.json")
        if route.path.endswith("/events"):
            yield route.path, json.dumps(looked.platform.events(looked.run)).encode()
        elif route.path.endswith("/trace"):
            yield route.path, looked.get(f"{path}?sample={looked.run}-train-1-0-0.0")
        else:
            yield route.path, looked.get(path)
    for route in platform_routes.ROOT_ROUTES:
        if isinstance(route, ScopedRoute):
            url = f"{looked.platform.url}{route.path}"
            yield route.path, looked.platform.api.get(url).content


def processes(part: str) -> bytes:
    """`cmdline` of every process of this machine, or `environ` of the platform's own."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            is_ours = any(name in command.decode(errors="replace") for name in OURS)
            if int(process.name) == os.getpid() or (part == "environ" and not is_ours):
                continue
            found.append((process / part).read_bytes())
        except OSError:  # it has ended
            continue
    return b"\n".join(found)


COMMANDS: Sequence[Sequence[str]] = (
    ("train", "info", "{run}"),
    ("train", "logs", "{run}"),
    ("train", "samples", "{run}", "--json"),
    ("train", "list", "--json"),
    ("train", "export", "{run}", "--to", "tensorboard", "--dir", "curves"),
    ("events", "{run}", "--json"),
    ("eval", "info", "{evaluation}", "--json"),
    ("secret", "list"),
    ("secret", "list", "--json"),
    ("doctor", "--json"),
    ("status", "--json"),
    ("audit", "--json"),
    ("workspace", "info", "w"),
)


def stored_places(looked: Looked) -> dict[str, Callable[[], bytes | Path]]:
    """The database and the API, by name."""
    found = {f"table {name}": data for name, data in tables(looked.platform.home).items()}
    found |= {f"GET {path}": answer for path, answer in routes(looked)}
    return {name: partial(bytes, data) for name, data in found.items()}


def places(looked: Looked) -> dict[str, Callable[[], bytes | Path]]:
    """Each place by name. Its function returns bytes, or a directory whose files are read."""
    home, root = looked.platform.home, looked.root
    found = stored_places(looked)
    names = {"run": looked.run, "evaluation": looked.evaluation}
    for command in COMMANDS:
        filled = [word.format(**names) for word in command]
        found[f"headrace {' '.join(command)}"] = partial(looked.command, *filled)
    return found | {
        "a refused submit": lambda: _refused(looked),
        "the backup": lambda: _made(looked, root / "backup", "backup", str(root / "backup")),
        "the export of curves": lambda: root / "curves",
        "the archive of the run": lambda: looked.command("train", "archive", looked.run),
        "every file of the home: logs, blobs, mirrors, archives": lambda: home,
        "the output of headrace up": lambda: home.with_name(f"{home.name}.up.log").read_bytes(),
        "files that were left in temporary directories": lambda: looked.temporary,
        "command lines of all processes": lambda: processes("cmdline"),
        "environments of our processes": lambda: processes("environ"),
        "effects, while the run worked": lambda: "\n".join(looked.effects).encode(),
        "spans": lambda: b"\n".join(looked.collector.bodies),
        "core dumps": lambda: b"\n".join(str(path).encode() for path in Path.cwd().glob("core*")),
    }


def _made(looked: Looked, target: Path, *command: str) -> Path:
    looked.command(*command)
    assert target.exists(), command
    return target


def _refused(looked: Looked) -> bytes:
    config: dict[str, Any] = looked.platform.info(looked.run)["run"]["config"]
    config = {
        "experiment": {k: v for k, v in config["experiment"].items() if v is not None},
        "secrets": {"required": ["KEY", "NOT_SET_AT_ALL"]},
    }
    refused = looked.platform.post("/runs", {"config": config, "workspace": "w"})
    assert refused.status_code == 400, refused.text
    return refused.content
