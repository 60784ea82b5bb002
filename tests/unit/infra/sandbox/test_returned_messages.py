"""Messages that cross the pipe to user code and back."""

from infra.ports.services import SandboxOwner
from infra.sandbox.calls import CallingUserCode, UserCall
from infra.sandbox.host_messages import Returned, ReturnedCall, ReturnedMessage
from schemas.models.openai_messages import openai_message
from schemas.sampling import Message, ToolCall
from schemas.secrets.secret_value import SecretValue
from tests.kit.specs import rollout_ref

SECRET = "hush-hush-hush"


class Leaking(CallingUserCode):
    """User code that returns a secret in every field."""

    async def make_call(self, call: UserCall) -> Returned:
        said = ReturnedMessage(
            role="assistant",
            content=SECRET,
            reasoning=SECRET,
            tool_calls=[ReturnedCall(id=SECRET, name=SECRET, arguments=SECRET)],
            tool_call_id=SECRET,
            name=SECRET,
        )
        return Returned(id="1", messages=[said])


async def test_secrets_are_masked_in_every_field() -> None:
    result = await Leaking().run_workflow(
        rollout_ref(workflow="Flow"),
        owner=SandboxOwner("r1", {"KEY": SecretValue(SECRET)}),
        sample="s",
        prompt=(),
        metadata={},
        base_path="/",
        api_key="k",
    )
    assert result.messages is not None
    (message,) = result.messages
    assert SECRET not in message.model_dump_json()
    assert message.tool_calls[0].arguments == message.content == message.reasoning == "***KEY***"


def test_a_message_has_openais_form() -> None:
    plain = Message(role="user", content="hi")
    assert openai_message(plain) == {"role": "user", "content": "hi"}
    call = ToolCall(id="c1", name="add", arguments="{}")
    said = Message(role="assistant", content="", reasoning="hm", tool_calls=(call,))
    assert openai_message(said) == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
        ],
    }
    heard = Message(role="tool", content="3", tool_call_id="c1", name="add")
    assert openai_message(heard)["tool_call_id"] == "c1"
    assert openai_message(heard)["name"] == "add"
