"""Errors in the form that the client reads: `error`, `code`, and what a code adds to it."""

import json
from collections.abc import Mapping, Sequence

from starlette.responses import Response

from producers.http.responses import ApiResponse
from schemas.errors import Issue, Refused
from schemas.secrets.redact import redact

KEPT_HEADERS = ("www-authenticate", "connection", "retry-after", "allow")

REASONS = {"expired": "TOKEN_EXPIRED", "revoked": "TOKEN_REVOKED"}
"""The codes of API keys that are known and not valid, by the reasons of the guard."""


class ClientRefused(Refused):
    """A refusal with a code that the client knows, and with fields that it reads beside the code."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        issues: tuple[Issue, ...] = (),
        fields: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message, issues=issues)
        self.status = status
        self.code = code
        self.fields = dict(fields or {})


def error_response(
    status: int,
    code: str,
    message: str,
    *,
    issues: Sequence[Issue] = (),
    fields: Mapping[str, object] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An error as the client reads it. `fields` are those that it reads beside the code."""
    content: dict[str, object] = {"error": redact(message), "code": code}
    if issues:
        content["issues"] = [_issue(issue) for issue in issues]
        content["field"] = issues[0].key
    return ApiResponse(
        {**content, **(fields or {})}, status_code=status, headers=dict(headers or {})
    )


def response_of(error: ClientRefused) -> Response:
    """The response that a refusal is."""
    return error_response(
        error.status, error.code, error.message, issues=error.issues, fields=error.fields
    )


def error_of_problem(
    status: int, document: bytes, *, headers: Mapping[str, str], has_api_key: bool
) -> Response:
    """A problem document of the API as an error of the client. `headers` are those of the problem, of
    which the ones that clients act on are kept."""
    problem = json.loads(document)
    code = str(problem["code"])
    if status == 401:
        code = REASONS.get(problem.get("reason"), "TOKEN_INVALID")
        code = code if has_api_key else "AUTH_HEADER_MISSING"
    issues = [Issue(one["key"], one["message"], one["did_you_mean"]) for one in problem["issues"]]
    kept = {name: headers[name] for name in KEPT_HEADERS if name in headers}
    return error_response(status, code, problem["detail"], issues=issues, headers=kept)


def _issue(issue: Issue) -> Mapping[str, str]:
    found = {"key": issue.key, "message": redact(issue.message)}
    return found if issue.did_you_mean is None else {**found, "key_correction": issue.did_you_mean}
