"""Which provider a model's name means, where its API is, and which secret holds its key.

A name is `PROVIDER/MODEL`, as LiteLLM writes it: `openai/gpt-5-mini`. All of these providers answer chat
completions in OpenAI's form. Any other server that does so is named by its `base_url`.
"""

import difflib
from dataclasses import dataclass
from urllib.parse import urlsplit

from schemas.errors import InvalidConfig
from schemas.network import NetworkAddress, parse_address
from schemas.sampling import ProviderRef
from schemas.text import plain

SHOWN = 120
"""How many characters of a name or an address an error shows."""

LONGEST_NAME, LONGEST_URL = 200, 500


@dataclass(frozen=True, slots=True)
class Provider:
    """A provider: the base URL of its API, and the name of the secret with its key. Its models take the
    limit of new tokens under the name `limit`."""

    base_url: str
    secret: str
    limit: str = "max_tokens"


PROVIDERS = {
    "openai": Provider("https://api.openai.com/v1", "OPENAI_API_KEY", "max_completion_tokens"),
    "anthropic": Provider("https://api.anthropic.com/v1", "ANTHROPIC_API_KEY"),
    "gemini": Provider("https://generativelanguage.googleapis.com/v1beta/openai", "GEMINI_API_KEY"),
    "xai": Provider("https://api.x.ai/v1", "XAI_API_KEY"),
    "openrouter": Provider("https://openrouter.ai/api/v1", "OPENROUTER_API_KEY"),
    "cerebras": Provider("https://api.cerebras.ai/v1", "CEREBRAS_API_KEY"),
    "groq": Provider("https://api.groq.com/openai/v1", "GROQ_API_KEY"),
    "mistral": Provider("https://api.mistral.ai/v1", "MISTRAL_API_KEY"),
    "deepseek": Provider("https://api.deepseek.com/v1", "DEEPSEEK_API_KEY"),
    "together_ai": Provider("https://api.together.xyz/v1", "TOGETHERAI_API_KEY"),
    "fireworks_ai": Provider("https://api.fireworks.ai/inference/v1", "FIREWORKS_AI_API_KEY"),
}

KEY_HOLDERS = {provider.secret: provider for provider in PROVIDERS.values()}
"""Secrets that hold the key of a provider, by their names."""

OWN_SERVERS = tuple(provider.base_url for provider in PROVIDERS.values())
"""The APIs of these providers. They are reached without the operator's permission, at public addresses
alone. Any other base URL is the operator's decision."""


class MisdirectedKey(InvalidConfig):
    """A provider's key would be sent to another server."""


def provider_ref(
    name: str, *, base_url: str | None = None, secret: str | None = None
) -> ProviderRef:
    """Return the model that `name` means. With a `base_url`, all of the name is what that server calls
    its model, and no key is sent unless `secret` names one. Raises InvalidConfig, and MisdirectedKey
    when `secret` holds the key of another provider."""
    if not name or len(name) > LONGEST_NAME or plain(name) != name or name.split() != [name]:
        raise InvalidConfig(
            f"{plain(name)[:SHOWN]!r} is not the name of a provider's model; write PROVIDER/MODEL, "
            "such as openai/gpt-5-mini"
        )
    if base_url is not None:
        check_base_url(base_url)
        _check_key(secret, base_url)
        return ProviderRef(name=name, model=name, base_url=base_url.rstrip("/"), secret=secret)
    provider, _, model = name.partition("/")
    if provider not in PROVIDERS or not model:
        close = difflib.get_close_matches(provider, PROVIDERS, n=1)
        meant = f"did you mean {close[0]}/{model or 'MODEL'}? " if close and not model else ""
        raise InvalidConfig(
            f"{name[:SHOWN]!r} names no known provider; {meant}write PROVIDER/MODEL with one of "
            f"{', '.join(PROVIDERS)}, or give the base URL of an OpenAI-compatible server"
        )
    found = PROVIDERS[provider]
    _check_key(secret, found.base_url)
    return ProviderRef(
        name=name,
        model=model,
        base_url=found.base_url,
        secret=secret or found.secret,
        limit=found.limit,
    )


def _check_key(secret: str | None, base_url: str) -> None:
    """Raise MisdirectedKey unless this server may get the key in a secret. One with the name of a
    provider's key goes to the server of that provider alone, over https."""
    holder = KEY_HOLDERS.get(secret or "")
    if holder is None or _server_of(holder.base_url) == _server_of(base_url):
        return
    raise MisdirectedKey(
        f"{secret} is a key for {urlsplit(holder.base_url).hostname} and is not sent to "
        f"{plain(base_url)[:SHOWN]}; store the key of that server under another name (`headrace secret "
        "set NAME`), and name it in api_key_secret"
    )


def _server_of(base_url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(base_url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname or "", port


def check_base_url(url: str) -> NetworkAddress:
    """Return the address of a base URL. Raises InvalidConfig unless it is an http or https URL without a
    user, a query or a fragment."""
    refusal = InvalidConfig(
        f"{plain(url.rpartition('@')[2])[:SHOWN]!r} is not the base URL of a provider; write one such "
        "as https://models.example.com/v1"
    )
    if len(url) > LONGEST_URL or plain(url) != url or url.split() != [url]:
        raise refusal
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        host = parts.hostname or ""
        address = parse_address(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    except (ValueError, KeyError) as error:
        raise refusal from error
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise refusal
    return address


def is_own_server(base_url: str) -> bool:
    """Whether this is the API of a provider that Headrace knows."""
    return base_url in OWN_SERVERS
