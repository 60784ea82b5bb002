"""HEADRACE_SANDBOX_LIMITS."""

import pytest

from infra.sandbox.levels.level import ProcessLimits
from infra.sandbox.service.child import make_env_vars
from infra.settings.sandbox_limits import GIB, SandboxLimits, load_sandbox_limits
from infra.settings.settings import BadSetting, Settings


def test_the_limits_that_are_not_named_are_the_defaults() -> None:
    assert load_sandbox_limits({}) == SandboxLimits()
    found = load_sandbox_limits({"HEADRACE_SANDBOX_LIMITS": "memory=8, processes=64"})
    assert found == SandboxLimits(memory_bytes=8 * GIB, processes=64)
    assert ProcessLimits.of_user_code(found).file_bytes == GIB


def test_the_sandbox_service_of_a_worker_gets_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sets them for user code (`test_hostile_code.py::test_the_operator_sets_the_limits`)."""
    monkeypatch.setenv("HEADRACE_SANDBOX_LIMITS", "memory=3,processes=99")
    found = load_sandbox_limits(make_env_vars("bwrap"))
    assert found == SandboxLimits(memory_bytes=3 * GIB, processes=99)
    monkeypatch.delenv("HEADRACE_SANDBOX_LIMITS")
    assert load_sandbox_limits(make_env_vars("bwrap")) == SandboxLimits()


@pytest.mark.parametrize(
    "value",
    ["memory", "memory=0", "disk=1.5", "cpus=2", "disk=1,disk=2", "processes=8", "disk=9999"],
)
def test_a_bad_limit_is_refused_with_the_form(value: str) -> None:
    with pytest.raises(BadSetting, match=r"HEADRACE_SANDBOX_LIMITS holds .* it may hold memory"):
        Settings.load({"HEADRACE_HOME": "/nowhere", "HEADRACE_SANDBOX_LIMITS": value})
