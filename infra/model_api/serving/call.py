"""A call from the control process to the process that serves: who asks, which model, and the request of
the client as it came.

A call is one line of JSON, followed by the body of the client.
"""

from typing import Literal

from pydantic import ValidationError

from infra.model_api.wire.errors import GatewayError
from schemas.deployments import ServedModel
from schemas.sampling import PolicyRef, Value

PATH = "/internal/serve"

WireName = Literal["chat", "completions"]


class ServingCall(Value):
    """A request for answers of a deployment, or of its base model alone (`is_base`). Its use is
    counted for the API key with the id `api_key`."""

    api_key: str
    wire: WireName
    served: ServedModel
    is_base: bool = False

    @property
    def model(self) -> str:
        """The name under which its use is counted."""
        return self.served.base_name if self.is_base else self.served.full_name

    @property
    def policy(self) -> PolicyRef:
        """The weights on top of the base model."""
        return PolicyRef(version=0) if self.is_base else self.served.policy

    def pack(self, body: bytes) -> bytes:
        """Return the call with the body of the client behind it."""
        return self.model_dump_json().encode() + b"\n" + body

    @classmethod
    def unpack(cls, data: bytes) -> "tuple[ServingCall, bytes]":
        """Return a call and the body of the client. Raises GatewayError (400)."""
        head, _, body = data.partition(b"\n")
        try:
            return cls.model_validate_json(head), body
        except ValidationError as error:
            text = "the call does not begin with a call of this version; update both processes"
            raise GatewayError(400, "invalid_call", text) from error
