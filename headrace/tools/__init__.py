"""Tools that a policy may call: functions marked by `@tool`, servers of MCP, and the loop that makes the
calls."""

from headrace.tools.function_tool import FunctionTool, OfferedTool, tool
from headrace.tools.results import ToolError
from headrace.tools.tool_set import ToolSet, UnusableTools

__all__ = ["FunctionTool", "OfferedTool", "ToolError", "ToolSet", "UnusableTools", "tool"]
