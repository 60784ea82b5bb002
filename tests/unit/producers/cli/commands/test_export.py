"""`headrace train export`: the API's data, read back through each tracker's own library."""

import importlib
import json
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from producers.cli.exporters.sink import NewPoints
from tests.unit.producers.cli.conftest import FakeServer, Run

LIBRARIES = {"tensorboard": "tensorboard.summary", "wandb": "wandb", "mlflow": "mlflow"}


def present(tracker: str) -> None:
    """Skip where the library is missing, but not on CI."""
    if not os.environ.get("CI"):
        pytest.importorskip(LIBRARIES[tracker])


def answer(status: str, *, reward: tuple[float, ...], validation: dict[int, float]) -> Any:
    points = [{"step": n, "value": value} for n, value in enumerate(reward, start=1)]
    held_out = [{"step": step, "value": value} for step, value in validation.items()]
    return {
        "run": {
            "id": "0123456789abcdef",
            "name": "sums",
            "status": status,
            "config": {"training": {"lr": 1e-5}, "advanced": {"seed": None}},
        },
        "checkpoints": [],
        "metrics": {"rollout/raw_reward": points, "reward/is it?": held_out},
    }


REWARD, HELD_OUT = (0.1, 0.25, 0.5), {0: 0.2, 2: 0.4}


@pytest.fixture
def run(server: FakeServer) -> FakeServer:
    server.answer("GET", "/runs/sums", answer("finished", reward=REWARD, validation=HELD_OUT))
    return server


def test_tensorboard_reads_every_point_once_however_often_it_is_exported(
    run: FakeServer, headrace: Run, tmp_path: Path
) -> None:
    present("tensorboard")
    for _ in range(2):
        made = headrace("train", "export", "sums", "--to", "tensorboard", "--dir", str(tmp_path))
        assert made.code == 0, made.err
        assert "4 steps: tensorboard --logdir" in made.out
    loader = importlib.import_module("tensorboard.backend.event_processing.event_file_loader")
    (directory,) = tmp_path.iterdir()
    assert directory.name == "sums-01234567"
    (file,) = directory.iterdir()
    found: dict[str, list[tuple[int, float]]] = {}
    for event in loader.EventFileLoader(str(file)).Load():
        for value in event.summary.value:
            point = (event.step, round(value.tensor.float_val[0], 6))
            found.setdefault(value.tag, []).append(point)
    assert found == {
        "rollout/raw_reward": [(1, 0.1), (2, 0.25), (3, 0.5)],
        "reward/is it?": [(0, 0.2), (2, 0.4)],
    }


def test_wandb_offline_holds_every_point_also_of_an_earlier_step(
    server: FakeServer, headrace: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A validation of step 1 that ends after step 3 is there as well."""
    present("wandb")
    monkeypatch.setattr("producers.cli.commands.export.POLL_S", 0.0)
    server.answer("GET", "/runs/sums", answer("running", reward=REWARD, validation={}))
    server.answer("GET", "/runs/sums", answer("finished", reward=REWARD, validation={1: 0.75}))
    made = headrace(
        *("train", "export", "sums", "--to", "wandb", "--offline", "--follow", "--json"),
        *("--dir", str(tmp_path), "--project", "p"),
    )
    assert made.code == 0, made.err
    assert made.document["steps"] == 3
    assert made.document["place"].startswith("wandb sync ")
    directory = Path(made.document["place"].removeprefix("wandb sync "))
    (file,) = directory.glob("run-*.wandb")
    rows = wandb_rows(file)
    assert [row for row in rows if "rollout/raw_reward" in row] == [
        {"step": n, "rollout/raw_reward": value} for n, value in enumerate(REWARD, start=1)
    ]
    assert {"step": 1, "reward/is it?": 0.75} in rows


def wandb_rows(file: Path) -> list[dict[str, float]]:
    """The history of an offline run, read with W&B's own message types."""
    records = importlib.import_module("wandb.proto.wandb_internal_pb2")
    rows = []
    for data in leveldb_log(file.read_bytes()[7:], behind=7):
        record = records.Record()
        record.ParseFromString(data)
        row = {
            "/".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in record.history.item
        }
        if row:
            rows.append({key: value for key, value in row.items() if not key.startswith("_")})
    return rows


def leveldb_log(data: bytes, *, behind: int) -> Iterator[bytes]:
    """The records of a LevelDB log, the container of W&B's offline files. A log consists of blocks
    of 32 KiB (the first is `behind` bytes shorter), which hold pieces of checksum, length and place
    (whole, first, middle, last)."""
    at, left, parts = 0, (1 << 15) - behind, b""
    while at + 7 <= len(data):
        if left < 7:
            at, left = at + left, 1 << 15
            continue
        _, size, place = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + size]
        at, left = at + 7 + size, left - 7 - size
        if place in (1, 4):
            yield parts
            parts = b""


def test_mlflow_holds_every_point_and_the_config(
    run: FakeServer, headrace: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    present("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    uri = (tmp_path / "mlruns").as_uri()
    made = headrace("train", "export", "sums", "--to", "mlflow", "--uri", uri, "--project", "p")
    assert made.code == 0, made.err
    client = importlib.import_module("mlflow").MlflowClient(uri)
    experiment = client.get_experiment_by_name("p")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.data.tags["headrace.run"] == "0123456789abcdef"
    assert found.data.params == {"training.lr": "1e-05"}
    assert (found.info.run_name, found.info.status) == ("sums", "FINISHED")
    history = client.get_metric_history(found.info.run_id, "rollout/raw_reward")
    assert [(m.step, m.value) for m in history] == list(enumerate(REWARD, start=1))
    renamed = client.get_metric_history(found.info.run_id, "reward/is it_")
    assert [(m.step, m.value) for m in renamed] == list(HELD_OUT.items())


def test_an_option_of_another_tracker_is_refused(run: FakeServer, headrace: Run) -> None:
    for options in (("--offline",), ("--uri", "x")):
        made = headrace("train", "export", "sums", "--to", "tensorboard", *options, "--json")
        assert made.code != 0
        assert made.error["code"] == "INVALID_OPTION"


@pytest.mark.parametrize("tracker", LIBRARIES)
def test_a_missing_library_says_how_to_install_it(
    run: FakeServer,
    headrace: Run,
    tracker: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, LIBRARIES[tracker], None)
    options = ("--to", tracker, "--dir", str(tmp_path), "--json")
    error = headrace("train", "export", "sums", *options).error
    assert error["code"] == "MISSING_LIBRARY"
    assert "pip install 'headrace[export]'" in error["message"]


def test_wandb_without_a_login_is_one_line_that_says_what_to_do(
    run: FakeServer, headrace: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    present("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    options = ("--to", "wandb", "--dir", str(tmp_path), "--json")
    made = headrace("train", "export", "sums", *options)
    assert made.code == 1
    assert made.error["code"] == "EXPORT_FAILED"
    for said in ("No API key", "wandb login", "--offline"):
        assert said in made.error["message"]


@pytest.mark.parametrize("uri", ["nonsense://x", "http://127.0.0.1:9"])
def test_mlflow_without_a_store_is_one_line_that_says_what_to_do(
    run: FakeServer, headrace: Run, monkeypatch: pytest.MonkeyPatch, uri: str
) -> None:
    present("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    made = headrace("train", "export", "sums", "--to", "mlflow", "--uri", uri, "--json")
    assert made.code == 1
    assert made.error["code"] == "EXPORT_FAILED"
    for said in (f"the tracking URI is {uri}", "mlflow server", "--uri http://host:port"):
        assert said in made.error["message"]


def test_mlflow_without_a_uri_names_its_own_default(
    run: FakeServer, headrace: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slim MLflow that the extra installs has no store of its own."""
    present("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "alembic", None)
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    made = headrace("train", "export", "sums", "--to", "mlflow", "--json")
    assert made.code == 1
    assert made.error["code"] == "EXPORT_FAILED"
    assert "no tracking URI is set" in made.error["message"]


def test_only_new_points_are_written() -> None:
    new = NewPoints()
    first = {"a": [{"step": 1, "value": 1.0}], "b": [{"step": 2, "value": 2.0}]}
    assert list(new.of(first)) == [(1, {"a": 1.0}), (2, {"b": 2.0})]
    later = {"a": first["a"], "b": [{"step": 1, "value": 3.0}, *first["b"]]}
    assert list(new.of(later)) == [(1, {"b": 3.0})]
    assert list(new.of(later)) == []
