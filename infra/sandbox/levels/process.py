"""Level `process-trusted`: another user (if we are root), limits, an empty environment and a session of
its own.

It trusts the author of the code. It protects the platform from accidents, not from attackers.
"""

import logging
import os
import pwd

from infra.sandbox.levels.level import GATEWAY_VARIABLE, ConfinedCommand
from infra.sandbox.user_process import UNPRIVILEGED, UserProcess
from infra.settings.sandbox_level import TRUSTED

logger = logging.getLogger(__name__)


class ProcessLevel:
    """`infra.sandbox.levels.level.Level` with no more than another user and limits. The limits are those
    that `headrace/user_code/launch.py` sets."""

    name = TRUSTED

    def __init__(self) -> None:
        logger.warning(
            "sandbox level 'process-trusted': user code runs as %s with limits, but sees this machine's "
            "files and network; run only code whose author you trust",
            describe_user(),
        )

    async def start(self, command: ConfinedCommand) -> UserProcess:
        gateway = {GATEWAY_VARIABLE: str(command.gateway)} if command.gateway else {}
        return UserProcess(
            command.argv,
            env={**command.env, **gateway},
            cwd=command.cwd,
            pass_fds=command.pass_fds,
        )

    async def aclose(self) -> None:
        """Nothing is kept ready."""


def describe_user() -> str:
    """The user that user code runs as, for the log."""
    if os.geteuid() == 0:
        return f"uid {UNPRIVILEGED}"
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container's user may have no entry
        return f"uid {os.geteuid()}"
