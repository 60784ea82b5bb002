"""The request that a try-out gets on its standard input, as the command line writes it."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict


class ProviderRequest(BaseModel):
    """A provider's model: its name, the base URL of an OpenAI-compatible API (None: a known provider's),
    and the environment variable with the key (None: the provider's usual one)."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    url: str | None = None
    key_env: str | None = None


class TryoutRequest(BaseModel):
    """Try a rollout of a workspace, evaluate it, or only check it.

    `config` is the TOML of the run or evaluation as a JSON object, and `config_path` its file for
    messages. `dataset` is a file with rows (None: the one of the config's dataset in the workspace).
    `rows` is how many rows to try, from the row `first`, each `attempts` times. `model` replaces the
    config's. `checkpoint` is a directory with the files of the checkpoint that the model names, and
    `full` says that they hold all weights and not an adapter. An evaluation takes its rows and its
    attempts from the config.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    mode: Literal["try", "evaluate", "validate"] = "try"
    workspace: Path
    rollout: str
    config: dict[str, object] | None = None
    config_path: str = ""
    dataset: Path | None = None
    rows: int = 1
    first: int = 0
    attempts: int = 1
    model: str | None = None
    checkpoint: Path | None = None
    provider: ProviderRequest | None = None
