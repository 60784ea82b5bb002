"""Says in one line why bubblewrap does not work here, and how to get it."""

import os
from pathlib import Path

from schemas.errors import InvalidConfig

TRUSTED = (
    "or, if you trust the author of all code that runs here, set HEADRACE_SANDBOX=process-trusted"
)
MISSING = "user code runs in bubblewrap, which is not installed; run: apt-get install bubblewrap"
NO_USER_NAMESPACES = (
    "No permissions to creat",  # bubblewrap's own words, in two spellings
    "setting up uid map",
    "Creating new namespace failed",
    "user namespace",
)


def missing() -> InvalidConfig:
    return InvalidConfig(f"{MISSING}, {TRUSTED}")


def explain(said: str) -> InvalidConfig:
    """Return the error for what bubblewrap printed before it ended."""
    lines = [line for line in said.strip().splitlines() if line.strip()]
    cause = lines[0].removeprefix("bwrap: ") if lines else "it ended without a message"
    return InvalidConfig(
        f"bubblewrap cannot confine user code here ({cause}); {_advice(said)}, {TRUSTED}"
    )


def _advice(said: str) -> str:
    if "Unknown option" in said:
        return "install bubblewrap 0.8 or newer"
    if any(words in said for words in NO_USER_NAMESPACES):
        if _reads("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1"):
            return (
                "AppArmor forbids user namespaces: give /usr/bin/bwrap a profile that allows `userns` "
                "(Ubuntu: /etc/apparmor.d/bwrap-userns-restrict of apparmor-profiles)"
            )
        if _reads("/proc/sys/kernel/unprivileged_userns_clone", "0"):
            return "run: sysctl -w kernel.unprivileged_userns_clone=1"
        if _reads("/proc/sys/user/max_user_namespaces", "0"):
            return "run: sysctl -w user.max_user_namespaces=10000"
    if _in_container():
        return (
            "this container may not make namespaces: run user code in the service `sandbox`, or start "
            "the container with security options seccomp=unconfined, apparmor=unconfined and "
            "systempaths=unconfined"
        )
    return "see that `bwrap --unshare-all --ro-bind / / true` works for an ordinary user"


def _reads(file: str, value: str) -> bool:
    try:
        return Path(file).read_text().strip() == value
    except OSError:
        return False


def _in_container() -> bool:
    return (
        Path("/.dockerenv").exists()
        or Path("/run/.containerenv").exists()
        or "KUBERNETES_SERVICE_HOST" in os.environ
    )
