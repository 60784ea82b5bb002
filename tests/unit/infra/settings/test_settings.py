"""Settings: their defaults, and a one-line error for each value that is not allowed."""

import logging
import os
import pwd
import signal
from pathlib import Path

import pytest

from infra import failpoints
from infra.operations.local import embedded_postgres
from infra.sandbox.levels.process import describe_user
from infra.settings.settings import BadSetting, Settings
from infra.telemetry import JsonLines
from schemas.errors import InvalidConfig


def test_defaults_follow_from_the_home(tmp_path: Path) -> None:
    settings = Settings.load({"HEADRACE_HOME": str(tmp_path)})
    assert settings.blobs == f"file://{tmp_path}/blobs"
    assert (settings.host, settings.port) == ("127.0.0.1", 8420)
    assert settings.database_url is None
    assert settings.quotas == settings.key_quotas == {}
    assert settings.read_api_key() is None
    (tmp_path / "token").write_text("abc\n")
    assert settings.read_api_key() == "abc"
    assert (
        Settings.load({"HEADRACE_API_KEY": "t", "HEADRACE_HOME": str(tmp_path)}).read_api_key()
        == "t"
    )


def test_the_old_name_of_the_variable_holds_the_key_too(tmp_path: Path) -> None:
    old = {"HEADRACE_TOKEN": "old", "HEADRACE_HOME": str(tmp_path)}
    assert Settings.load(old).api_key == "old"
    assert Settings.load(old | {"HEADRACE_API_KEY": "new"}).api_key == "new"
    assert Settings.load(old | {"HEADRACE_API_KEY": " "}).api_key == "old"


def test_an_api_key_loses_the_line_break_of_a_file(tmp_path: Path) -> None:
    settings = Settings.load({"HEADRACE_API_KEY": "abc\n", "HEADRACE_HOME": str(tmp_path)})
    assert settings.api_key == "abc"


@pytest.mark.parametrize("api_key", ["hr_a_b\nmade the key", "tök", "a b"])
def test_an_api_key_that_no_request_can_carry_is_refused_and_not_shown(api_key: str) -> None:
    with pytest.raises(
        BadSetting, match=r"HEADRACE_API_KEY .* the text of the API key alone"
    ) as raised:
        Settings.load({"HEADRACE_API_KEY": api_key})
    assert api_key not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("HEADRACE_URL", "localhost", "http://host:port"),
        ("HEADRACE_RETENTION_DAYS", "30d", "a whole number from 0 to 36500"),
        ("HEADRACE_EVALUATION_DAYS", "-1", "a whole number from 0 to 36500"),
        ("HEADRACE_RECORD_DAYS", "a year", "a whole number from 0 to 36500"),
        ("HEADRACE_POLL_S", "often", "a whole number from 0 to 86400"),
        ("HEADRACE_URL", "http://h:notaport", "http://host:port"),
        ("HEADRACE_DATABASE_URL", "mysql://x", "postgresql://"),
        ("HEADRACE_BLOBS", "/somewhere", "file:///directory or s3://bucket/prefix"),
        ("HEADRACE_BLOBS", "s3://", "s3://bucket/prefix"),
        ("HEADRACE_BLOBS", "s3://b", "s3://bucket/prefix"),
        ("HEADRACE_BLOBS", "s3://Bucket/x", "s3://bucket/prefix"),
        ("HEADRACE_BLOBS", "s3://bucket//x", "s3://bucket/prefix"),
        ("HEADRACE_BLOBS", "s3://bucket/a/../x", "s3://bucket/prefix"),
        ("HEADRACE_BLOBS", "s3://bucket/a b", "s3://bucket/prefix"),
        ("HEADRACE_S3_ENDPOINT", "minio:9000", "http://host:port"),
        ("AWS_ENDPOINT_URL", "minio", "http://host:port"),
        ("HEADRACE_S3_PUBLIC_ENDPOINT", "http://store.example:9000", "https://host:port"),
        ("HEADRACE_S3_PUBLIC_ENDPOINT", "http://127.0.0.1.example", "https://host:port"),
        ("HEADRACE_S3_PUBLIC_ENDPOINT", "https://h/path", "https://host:port"),
        ("HEADRACE_S3_PUBLIC_ENDPOINT", "https://h?x=1", "https://host:port"),
        ("HEADRACE_S3_PUBLIC_ENDPOINT", "https://h:x", "https://host:port"),
        ("HEADRACE_S3_PUBLIC_ENDPOINT", "https://h", "HEADRACE_BLOBS=s3://"),
        ("HEADRACE_SAMPLER", "magic", "torch"),
        ("HEADRACE_SAMPLER", "vllm=", "torch, vllm, or vllm=http://host:port"),
        ("HEADRACE_SAMPLER", "vllm=h:1", "torch, vllm, or vllm=http://host:port"),
        ("HEADRACE_SAMPLER", "vllm=http://h:1,http://h:1/", "each server once"),
        ("HEADRACE_SANDBOX", "process", "process-trusted"),
        ("HEADRACE_SANDBOX", "none", "bwrap"),
        ("HEADRACE_QUOTAS", "runs=1", "runs_per_day"),
        ("HEADRACE_QUOTAS", "runs_per_day=many", "runs_per_day"),
        ("HEADRACE_KEY_QUOTAS", "runs_per_day=1,runs_per_day=2", "runs_per_day"),
        ("HEADRACE_KEY_QUOTAS", "samples_in_flight=9", "runs_per_day"),
        ("HEADRACE_NETWORK_ALLOW", "a.org:443", "workspace=host:port"),
        ("HEADRACE_NETWORK_ALLOW", "w=a.org", "workspace=host:port"),
        ("HEADRACE_NETWORK_ALLOW", "w=a.org:443;w=b.org:443", "workspace=host:port"),
    ],
)
def test_a_bad_value_is_one_line_with_name_value_and_what_may_be(
    name: str, value: str, says: str
) -> None:
    with pytest.raises(BadSetting) as raised:
        Settings.load({name: value})
    line = str(raised.value)
    assert name in line
    assert repr(value) in line
    assert says in line
    assert "\n" not in line


def test_nothing_is_archived_by_itself_until_days_are_named() -> None:
    found = [Settings.load({"HEADRACE_RETENTION_DAYS": days}) for days in ("", "0", "30")]
    assert [settings.retention_days for settings in found] == [None, None, 30]
    assert [settings.evaluation_days for settings in found] == [None] * 3


def test_records_are_kept_for_90_days_unless_told_otherwise() -> None:
    found = [Settings.load({"HEADRACE_RECORD_DAYS": days}) for days in ("", "0", "30")]
    assert [settings.record_days for settings in found] == [90, None, 30]


def test_blobs_may_be_in_a_bucket() -> None:
    settings = Settings.load({"HEADRACE_BLOBS": "s3://bucket/some/where/"})
    assert settings.blobs == "s3://bucket/some/where"
    assert settings.s3_endpoint is None
    assert Settings.load({"HEADRACE_BLOBS": "s3://my.bucket-1"}).blobs == "s3://my.bucket-1"


def test_the_endpoint_is_ours_before_it_is_boto3_s() -> None:
    named = {"AWS_ENDPOINT_URL": "http://a:1"}
    assert Settings.load(named).s3_endpoint == "http://a:1"
    named["AWS_ENDPOINT_URL_S3"] = "http://b:2"
    assert Settings.load(named).s3_endpoint == "http://b:2"
    named["HEADRACE_S3_ENDPOINT"] = "https://c/"
    assert Settings.load(named).s3_endpoint == "https://c"


@pytest.mark.parametrize("address", ["https://s:9000", "http://127.0.0.1:1", "http://[::1]:1"])
def test_the_public_endpoint_of_a_store_is_safe_to_send_to(address: str) -> None:
    named = {"HEADRACE_BLOBS": "s3://bucket/x", "HEADRACE_S3_PUBLIC_ENDPOINT": f"{address}/"}
    assert Settings.load(named).s3_public_endpoint == address
    assert Settings.load({"HEADRACE_BLOBS": "s3://bucket/x"}).s3_public_endpoint is None


def test_failpoints_are_parsed_and_refused() -> None:
    stopped = failpoints.Point(3, signal.SIGSTOP)
    assert failpoints.parse("a.b:1,c:3:stop") == {"a.b": failpoints.Point(1), "c": stopped}
    for bad in ("a", "a:0", "a:x", ":1", "a:1:halt", "a:stop"):
        with pytest.raises(ValueError, match="HEADRACE_FAILPOINT"):
            failpoints.parse(bad)


def test_a_failpoint_fires_at_its_hit_and_once_per_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, signal: kills.append(signal))
    for expected in (1, 1):
        points = failpoints.Failpoints({"p": failpoints.Point(2)}, tmp_path)
        for _ in range(5):
            points.hit("p")
            points.hit("other")
        assert len(kills) == expected


def test_the_sampler_may_be_vllm_servers() -> None:
    assert Settings.load({}).vllm is None
    told = {"HEADRACE_SAMPLER": "vllm=http://a:1, http://b:2/", "HEADRACE_HOME": "/h"}
    vllm = Settings.load(told).vllm
    assert vllm is not None
    assert vllm.urls == ("http://a:1", "http://b:2")
    assert vllm.adapters == Path("/h/adapters")
    told |= {"HEADRACE_VLLM_ADAPTERS": "/mnt/adapters", "HEADRACE_VLLM_API_KEY": "secret"}
    vllm = Settings.load(told).vllm
    assert vllm is not None
    assert vllm.adapters == Path("/mnt/adapters")
    assert vllm.api_key == "secret"
    assert "secret" not in repr(vllm)
    with pytest.raises(BadSetting, match=r"HEADRACE_VLLM_ADAPTERS .* an absolute path"):
        Settings.load({**told, "HEADRACE_VLLM_ADAPTERS": "adapters"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HEADRACE_DATABASE_URL", "mysql://user:hunter2@host/db"),
        ("HEADRACE_URL", "http://user:hunter2@host:notaport"),
        ("HEADRACE_S3_ENDPOINT", "user:hunter2@host"),
        ("HEADRACE_BLOBS", "s3://user:hunter2@bucket/prefix"),
        ("HEADRACE_SAMPLER", "vllm=http://user:hunter2@host:port"),
        ("HEADRACE_KAFKA", "user:hunter2@host:9092"),
        ("HEADRACE_SANDBOX", "user:hunter2@x"),
    ],
)
def test_an_error_shows_no_password(name: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=name) as raised:
        Settings.load({"HEADRACE_HOME": str(tmp_path), name: value})
    assert "hunter2" not in str(raised.value)


def test_a_representation_of_the_settings_shows_no_secret(tmp_path: Path) -> None:
    settings = Settings.load(
        {
            "HEADRACE_HOME": str(tmp_path),
            "HEADRACE_TOKEN": "hunter2",
            "HEADRACE_DATABASE_URL": "postgresql://u:hunter2@h/d",
        }
    )
    assert "hunter2" not in repr(settings)


def test_a_log_line_shows_no_password() -> None:
    record = logging.makeLogRecord({"msg": "%s", "args": ("postgresql://u:hunter2@h/d",)})
    assert "hunter2" not in JsonLines("test").format(record)


def test_a_user_without_a_home_is_told_to_name_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unknown(uid: int) -> object:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("HOME")
    with pytest.raises(BadSetting, match=r"HEADRACE_HOME is not set.*no home directory; set it"):
        Settings.load({})
    assert Settings.load({"HEADRACE_HOME": str(tmp_path)}).home == tmp_path
    with pytest.raises(InvalidConfig, match="set HEADRACE_DATABASE_URL to a server"):
        embedded_postgres.check_user()
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert describe_user() == "uid 54321"
