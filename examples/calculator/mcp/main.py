"""A calculator, as a server of the Model Context Protocol."""

from mcp.server.fastmcp import FastMCP

server = FastMCP("calculator")


@server.tool()
def calc(left: int, operator: str, right: int) -> int:
    """Compute a sum or a difference."""
    return left + right if operator == "+" else left - right
