"""The settings of packages."""

import os
from pathlib import Path

import pytest

from infra.settings.packages import KEPT_MB, SYSTEM_DIRECTORY, PackageSettings
from infra.settings.settings import BadSetting, Settings


def test_the_defaults_follow_from_the_user_and_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = PackageSettings.load({})
    assert settings.index is None
    assert settings.kept_bytes == KEPT_MB << 20
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert PackageSettings.load({}).directory == SYSTEM_DIRECTORY
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("HOME", "/home/someone")
    assert PackageSettings.load({}).directory == Path("/home/someone/.headrace/packages")
    elsewhere = PackageSettings.load({"HEADRACE_HOME": "/srv/headrace"})
    assert elsewhere.directory == Path("/srv/headrace/packages")


def test_every_variable_sets_its_value() -> None:
    settings = PackageSettings.load(
        {
            "HEADRACE_PACKAGE_INDEX": "https://index.example/simple",
            "HEADRACE_PYTHONS": "/opt/a/bin/python3:/opt/b/bin/python3",
            "HEADRACE_ENVIRONMENTS": "/srv/environments",
            "HEADRACE_ENVIRONMENTS_MB": "100",
        }
    )
    assert settings.index == "https://index.example/simple"
    assert settings.pythons == (Path("/opt/a/bin/python3"), Path("/opt/b/bin/python3"))
    assert settings.directory == Path("/srv/environments")
    assert settings.kept_bytes == 100 << 20


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HEADRACE_PACKAGE_INDEX", "/srv/wheels"),
        ("HEADRACE_PACKAGE_INDEX", "ftp://index.example"),
        ("HEADRACE_PACKAGE_INDEX", "https://me:hidden@index.example/simple"),
        ("HEADRACE_ENVIRONMENTS", "environments"),
        ("HEADRACE_ENVIRONMENTS_MB", "99"),
        ("HEADRACE_ENVIRONMENTS_MB", "many"),
    ],
)
def test_a_bad_value_stops_the_start_and_no_password_is_shown(name: str, value: str) -> None:
    with pytest.raises(BadSetting, match=name) as bad:
        Settings.load({name: value})
    assert "hidden" not in str(bad.value)
