"""The whole GPU benchmark runs on a CPU with tiny shapes, and without a platform around it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROGRAM = """
import importlib, sys
from bench import gpu

sys.argv[1:] = ["--tiny"]
gpu.main()
for name in ("asyncpg", "aiokafka", "infra.settings.settings", "consumers", "producers"):
    assert name not in sys.modules, name
    try:
        importlib.import_module(name)
    except ImportError as error:
        print("refused:", error)
"""


def test_tiny_prints_both_tables_and_imports_no_platform() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1].strip() for line in done.stdout.splitlines() if "|" in line]
    assert [r for r in rows if r.startswith(("tiny", "Headrace", "Transformers"))] == [
        "tiny Qwen3",
        "Headrace",
        "Transformers generate",
    ]
    assert "not how fast it is" in done.stdout
    refused = [line for line in done.stdout.splitlines() if line.startswith("refused:")]
    said = [line.rpartition(" ")[2] for line in refused]
    assert said == ["asyncpg", "aiokafka", "infra", "consumers", "producers"]
