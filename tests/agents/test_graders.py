"""Ready graders that use a package, with the real packages in environments of their own. And the alias
of `osmosis_ai`, beside the real package."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.agents, pytest.mark.processes]

MATH = r"""
import json, time
from headrace.graders import math_verify

ANSWERS = [
    (r"Thus the area is $\boxed{\frac{2}{4}}$.", "1/2"),
    (r"So $x = 0.5$", r"\frac{1}{2}"),
    (r"The roots are $\boxed{\{1, 2\}}$", r"$\{2, 1\}$"),
    (r"\boxed{(x+1)^2}", "x^2 + 2x + 1"),
    (r"\boxed{3}", "4"),
    ("I do not know", "4"),
    ("", "4"),
]
HOSTILE = ["1" * (1 << 20), r"\boxed{" * 50_000, "x^" * 10_000 + "2", r"$\frac{" + "9" * 9000 + "}{7}$"]
begun = time.perf_counter()
wrong = [math_verify(text, "4") for text in HOSTILE]
took = time.perf_counter() - begun
try:
    math_verify("4", "")
    said = None
except ValueError as error:
    said = str(error)
print(json.dumps({"rewards": [math_verify(*one) for one in ANSWERS], "wrong": wrong, "took": took,
                  "said": said}))
"""

SCHEMA = r"""
import json
from headrace.graders import json_schema

schema = {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}
answers = ['{"a": 1, "b": 2}', '{"a": 1}', "{}", "[" * 100_000]
print(json.dumps([json_schema(text, json.dumps(schema)) for text in answers]))
"""

BESIDE = r"""
import importlib.util, json, sys
from headrace.legacy import provide_alias

provide_alias()
print(json.dumps([("osmosis_ai" in sys.modules), importlib.util.find_spec("osmosis_ai").origin]))
"""


def run(directory: Path, program: str, *packages: str) -> Any:
    """Run a program in an environment with these packages, and return the JSON that it prints."""
    uv = str(Path(sys.executable).with_name("uv"))
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, directory / "venv"], check=True)
    python = str(directory / "venv" / "bin" / "python")
    install = [uv, "pip", "install", "-q", "--python", python, *packages]
    subprocess.run(install, check=True)
    done = subprocess.run(
        [python, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_expressions_are_compared_by_math_verify(tmp_path: Path) -> None:
    found = run(tmp_path, MATH, "math-verify[antlr4_13_2]")
    assert found["rewards"] == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert found["wrong"] == [0.0, 0.0, 0.0, 0.0]
    assert found["took"] < 60
    assert "this row has no ground truth" in found["said"]


def test_every_keyword_is_checked_where_jsonschema_is_installed(tmp_path: Path) -> None:
    assert run(tmp_path, SCHEMA, "jsonschema") == [1.0, 0.0, 1.0, 0.0]


def test_the_real_package_stays_where_it_is_installed(tmp_path: Path) -> None:
    package = tmp_path / "wheel" / "osmosis_ai"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("real = True\n")
    (package.parent / "pyproject.toml").write_text(
        '[project]\nname = "osmosis-ai"\nversion = "0"\n[tool.setuptools]\npackages = ["osmosis_ai"]\n'
    )
    imported, origin = run(tmp_path, BESIDE, str(package.parent))
    assert not imported
    assert "site-packages" in origin
