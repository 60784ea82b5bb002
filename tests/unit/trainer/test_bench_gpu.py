"""The whole GPU benchmark runs on a CPU with tiny shapes, and without a platform around it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    what = ["-c", code] if code else ["-m", "bench.gpu", *arguments]
    return subprocess.run(
        [sys.executable, *what], capture_output=True, text=True, check=False, cwd=ROOT
    )


def test_tiny_prints_both_tables() -> None:
    done = run("--tiny")
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1].strip() for line in done.stdout.splitlines() if "|" in line]
    assert [r for r in rows if r.startswith(("tiny", "Headrace", "Transformers"))] == [
        "tiny Qwen3",
        "Headrace",
        "Transformers generate",
    ]
    assert "not how fast it is" in done.stdout


def test_it_imports_no_platform() -> None:
    code = """
import importlib, sys
from bench import gpu
sys.meta_path.insert(0, gpu.Guard())
import bench.gpu_tables
for name in ("asyncpg", "aiokafka", "infra.settings.settings", "consumers", "producers"):
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(error)
"""
    done = run(code=code)
    assert done.returncode == 0, done.stderr
    said = [line.rpartition(" ")[2] for line in done.stdout.splitlines()]
    assert said == ["asyncpg", "aiokafka", "infra", "consumers", "producers"]
