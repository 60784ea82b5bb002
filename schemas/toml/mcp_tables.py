"""The MCP servers of a repository: `[[mcp]]` of `headrace.toml`.

`headrace/tools/mcp_config.py` reads them inside of the sandbox. Here they are only checked, so that a
push shows the mistakes.
"""

from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from schemas.config import Section
from schemas.toml.violations import violation

MOST_SERVERS = 16
LONGEST_WORD = 1024

Word = Annotated[str, StringConstraints(min_length=1, max_length=LONGEST_WORD)]


class McpTable(Section):
    """A server of MCP, whose tools the built-in loop offers ([rollouts](rollouts.md#mcp-servers))."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    """its name, which `mcp` of an AgentWorkflow may list"""
    command: Word | Annotated[tuple[Word, ...], Field(min_length=1, max_length=100)] | None = None
    """the program that is started with the rollout, in its sandbox; `python` is the rollout's own"""
    url: (
        Annotated[str, StringConstraints(pattern=r"^https?://", max_length=LONGEST_WORD)] | None
    ) = None
    """the address of a server; without `command` it is elsewhere, and `advanced.network` names it"""

    @model_validator(mode="after")
    def _has_a_place(self) -> Self:
        if self.command is None and self.url is None:
            raise violation("needs a command or a url; give one of them")
        return self
