"""Draws one sample for people: its turns, tool calls, reward, failure, prints and files.

All of it is text of models and users, so control characters are removed.
"""

from producers.cli.display.output import Document, one_line, printable, say
from producers.cli.display.units import format_size

INDENT = "    "


def show_messages(messages: list[Document]) -> None:
    """Print the messages of a conversation, each with its role."""
    for message in messages:
        name = f" {message['name']}" if message.get("name") else ""
        answers = message.get("tool_call_id")
        say(f"  [{message.get('role')}{name}]" + (f" answers {answers}" if answers else ""))
        if message.get("reasoning_content"):
            say(_indent(f"(reasoning) {message['reasoning_content']}"))
        if message.get("content"):
            say(_indent(str(message["content"])))
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            say(_indent(f"calls {function.get('name')}({function.get('arguments')})"))


def show_reward(sample: Document) -> None:
    """Print the reward of a sample with its parts, or why it has none."""
    shown = parts_text(sample)
    reward = sample.get("reward")
    say(
        f"  reward: {'none' if reward is None else format(reward, 'g')}"
        + (f" ({shown})" if shown else "")
    )
    for turn in sample.get("rewarded_turns") or ():
        say(f"  turn {turn.get('turn')}: {credit_text(turn)}")
    for agent, reward in (sample.get("agent_rewards") or {}).items():
        say(f"  agent {agent}: reward {reward:g}")
    if sample.get("error"):
        say(f"  error: {sample['error']}")
    for judgement in sample.get("judgements") or ():
        score, problem = judgement.get("score"), judgement.get("problem")
        shown = "no score" if score is None else format(score, "g")
        said = one_line(str(problem or judgement.get("explanation") or ""), limit=400)
        say(f"  {judgement.get('rubric')}: {shown} by {judgement.get('model')} ({said})")


def parts_text(sample: Document) -> str:
    """The parts of the reward of a sample, each with its name. Empty without parts."""
    parts: Document = sample.get("parts") or {}
    return ", ".join(f"{name} {value:g}" for name, value in parts.items())


def credit_text(turn: Document) -> str:
    """The agent that answered a turn, and the reward of the turn, as far as the workflow said them."""
    agent, reward = turn.get("agent"), turn.get("reward")
    shown = [str(agent)] if agent else []
    return ", ".join([*shown, f"reward {reward:g}"] if reward is not None else shown)


def show_output(output: Document, *, of: str = "") -> None:
    """Print what user code left behind: its prints, its traceback, and the names of its files."""
    for title, text in (("printed", output.get("stdout")), ("traceback", output.get("traceback"))):
        if text:
            say(f"  {title}{of}:")
            say(_indent(str(text).rstrip("\n")))
    for name, size in (output.get("files") or {}).items():
        say(f"  file{of}: {name} ({format_size(size)})")
    if output.get("is_cut"):
        say(f"  (there was more{of}; a part was left out)")


def _indent(text: str) -> str:
    return "\n".join(INDENT + line for line in printable(text).split("\n"))
