"""The packages `langchain-openai` and `langgraph`: a graph that calls tools until none is left."""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


async def run(base_url: str, api_key: str, prompt: str) -> str:
    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key).bind_tools([add])

    async def call_model(state: MessagesState) -> dict[str, object]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", call_model)
    graph.add_node("tools", ToolNode([add], handle_tool_errors=True))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    try:
        ended = await graph.compile().ainvoke(
            {"messages": [("user", prompt)]}, {"recursion_limit": 8}
        )
    except GraphRecursionError:
        return ""
    return str(ended["messages"][-1].content)
