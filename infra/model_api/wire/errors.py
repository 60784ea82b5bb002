"""The errors by which the gateway refuses requests, in every wire format."""

from schemas.errors import FailureCategory


class GatewayError(Exception):
    """A request was refused. The answer is the error object of its wire format, with this HTTP status
    and code."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        parameter: str | None = None,
        category: FailureCategory | None = None,
    ) -> None:
        """`category` is that of the engine's failure, if the engine refused the request."""
        super().__init__(message)
        self.category = category
        self.status = status
        self.parameter = parameter
        self.code = code
        self.message = message
        self.is_final = False
        """Whether the connection is closed after the answer."""


def unsupported(parameter: str, why: str) -> GatewayError:
    """Return the refusal of a parameter by name."""
    text = f"{parameter}: {why}"
    return GatewayError(400, "unsupported_parameter", text, parameter=parameter)


def invalid(parameter: str, why: str) -> GatewayError:
    """Return the refusal of a value that is not valid."""
    return GatewayError(400, "invalid_request", f"{parameter}: {why}", parameter=parameter)


def no_token_count() -> GatewayError:
    """Return the refusal to count the tokens of a prompt."""
    return GatewayError(
        404,
        "not_found",
        "the model of this sample does not count tokens; read the usage of an answer",
    )
