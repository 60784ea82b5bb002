"""`python -m consumers` hosts only what a process without the control process's ports can do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from consumers.process.command import HOSTABLE, RELAY, main
from consumers.registry import CONTROL_CONSUMERS, CONTROL_ONLY, REGISTRY, lanes_of, load
from infra.operations.local.child import AWAY
from infra.operations.local.free_port import free_port
from schemas.effects import Lane


@pytest.mark.parametrize("name", CONTROL_ONLY)
def test_a_consumer_of_the_control_process_is_refused_with_a_sentence(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sync", name]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{name} runs only in the control process")
    assert said.endswith(f"leave out {name}\n")


def test_an_unknown_consumer_is_refused_with_those_that_can_be_hosted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["triggers"]) == 2
    assert capsys.readouterr().err.endswith(f"there are: {', '.join(HOSTABLE)}\n")


def test_only_the_control_process_serves_submissions() -> None:
    others = [load(name) for name in HOSTABLE if name != RELAY]
    assert Lane.SUBMIT not in lanes_of(others)
    assert Lane.SUBMIT in lanes_of([load(name) for name in CONTROL_CONSUMERS])
    assert {*HOSTABLE, *CONTROL_ONLY} == {*REGISTRY, RELAY}


@pytest.mark.processes
@pytest.mark.parametrize("module", ["consumers", "producers.serve"])
def test_a_process_whose_database_is_away_says_so_in_one_line(tmp_path: Path, module: str) -> None:
    environment = {
        **os.environ,
        "HEADRACE_HOME": str(tmp_path),
        "HEADRACE_DATABASE_URL": f"postgresql://h:p@127.0.0.1:{free_port()}/h",
    }
    arguments = ["run"] if module == "consumers" else []
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == AWAY
    [line] = done.stderr.splitlines()
    assert line.startswith("no Postgres answers at HEADRACE_DATABASE_URL")
