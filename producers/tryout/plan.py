"""Turns the request for a try-out into what the platform needs: a config, rows, and a model."""

import asyncio
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from consumers.process.tryout import Tryout
from infra.identity.secrets.memory import MemorySecrets
from infra.model_api.providers.endpoints import provider_ref
from infra.ports.secrets import SecretOwner
from producers.core.datasets.readers import FORMATS
from producers.core.datasets.rules import FileReport, check_file
from producers.core.lookup import CHECKPOINT
from producers.core.models.model_ref import local_model
from producers.core.models.provider_model import owned_model
from producers.core.models.provider_model import provider_model as configured_model
from producers.core.validation.model_issues import missing_symbols
from producers.tryout.request import ProviderRequest, TryoutRequest
from schemas.config import EvalAdvanced, EvalConfig, RunConfig, Training
from schemas.datasets import DatasetRow, parse_rows
from schemas.errors import InvalidConfig, Issue, NotFound
from schemas.limits import longest_answer
from schemas.models.scratch import CHARACTERS, PREFIX, scratch_shape
from schemas.sampling import PROVIDER_PREFIX, ModelRef, ProviderRef, SamplingParams
from schemas.secrets.secret_value import SecretValue
from schemas.specs import Entrypoint, RolloutRef
from schemas.toml.config_issues import config_issues
from schemas.toml.generated_tasks import dataset_name, is_generated
from schemas.toml.parser import parse_eval, parse_run, refuse

Config = RunConfig | EvalConfig
MAIN = "main.py"
PLACES = ("data/{}.jsonl", "data/{}.csv", "{}.jsonl", "{}.csv")
"""Where the file of a dataset is looked for in a workspace."""

OWNER = "tryout"
PROVIDER_S = 60.0
"""How long a provider may take to answer."""


@dataclass(frozen=True, slots=True)
class DatasetFile:
    """A dataset's file with what was found in it."""

    path: Path
    report: FileReport
    rows: tuple[DatasetRow, ...]


def parse_config(request: TryoutRequest) -> Config:
    """The config of a try-out. Raises InvalidConfig with the issues of its keys."""
    written = dict(request.config or {})
    given = written.get("experiment")
    experiment: dict[str, object] = {
        "rollout": request.rollout,
        "entrypoint": MAIN,
        "dataset": request.rollout,
        **(given if isinstance(given, dict) else {}),
    }
    named = request.provider.name if request.provider else request.model
    if named is not None:
        experiment["model_path"] = named
    written["experiment"] = experiment
    if "model_path" not in experiment:
        raise InvalidConfig(
            "the model is not named; give --model, or a config with experiment.model_path"
        )
    return parse_eval(written) if "evaluation" in written else parse_run(written)


def entrypoint_of(request: TryoutRequest, config: Config | None) -> Entrypoint:
    """The entry point that the config names, or the main.py of the rollout."""
    experiment = config.experiment if config else None
    path = experiment.entrypoint if experiment else None
    return Entrypoint(
        rollout=(experiment.rollout if experiment else None) or request.rollout, path=path or MAIN
    )


def no_secrets() -> MemorySecrets:
    """A store without secrets, for checks that run no workflow."""
    return MemorySecrets()


def dataset_path(request: TryoutRequest, config: Config) -> Path:
    """The file with the rows. Raises NotFound when the workspace has none for the config's dataset."""
    if request.dataset is not None:
        return request.dataset
    ref = config.experiment.dataset
    name = dataset_name(ref)
    for place in PLACES:
        path = request.workspace / place.format(name)
        if path.is_file():
            return path
    if is_generated(ref):
        raise NotFound(
            f"the workspace has no data/{name}.jsonl; generate it with `headrace dataset generate "
            f"'{ref}' --out data/{name}.jsonl`"
        )
    raise NotFound(
        f"the workspace has no data/{name}.jsonl or data/{name}.csv; give the dataset's file with "
        "--dataset FILE"
    )


def read_dataset(path: Path) -> DatasetFile:
    """Read and check a dataset's file. Raises InvalidConfig when its ending is unknown, NotFound when
    it is missing."""
    kind = FORMATS.get(path.suffix.lower())
    if kind is None:
        raise InvalidConfig(f"{path.name} cannot be read; use a file that ends with .jsonl or .csv")
    if not path.is_file():
        raise NotFound(f"there is no file {path}; give the path of a dataset's file")
    content = io.BytesIO()
    report = check_file(path, kind, content.write)
    rows = () if report.issues else parse_rows(content.getvalue())
    return DatasetFile(path, report, rows)


def check_rows(file: DatasetFile) -> None:
    """Raises InvalidConfig with the issues of a dataset's file."""
    if file.report.issues:
        first = file.report.issues[0]
        raise InvalidConfig(
            f"{file.path.name} is not a dataset: {first.key}: {first.message}",
            issues=tuple(
                Issue(f"{file.path.name}: {i.key}", i.message) for i in file.report.issues
            ),
        )


def character_warnings(model: str, file: DatasetFile) -> Iterator[str]:
    """A warning if the rows have characters that a scratch model does not have. Raises InvalidConfig
    when there is no such shape."""
    if model.startswith(PREFIX):
        vocabulary = CHARACTERS[scratch_shape(model).vocabulary]
        yield from missing_symbols(vocabulary, file.path.name, file.report.characters)


def check_evaluation(config: Config) -> EvalConfig:
    """The config of an evaluation. Raises InvalidConfig with the issues that it has by itself."""
    if not isinstance(config, EvalConfig):
        raise InvalidConfig("this is the config of a run; give one with [evaluation]")
    if issues := tuple(config_issues(config)):
        raise refuse("evaluation", issues)
    return config


def needs_engine(request: TryoutRequest, config: Config) -> bool:
    """Whether the model is sampled here, and not by a provider."""
    return request.provider is None and not _names_provider(config)


def _names_provider(config: Config) -> bool:
    is_provider = config.experiment.model_path.startswith(PROVIDER_PREFIX)
    return isinstance(config, EvalConfig) and is_provider


async def resolve_model(request: TryoutRequest, config: Config, *, tryout: Tryout) -> ModelRef:
    """The model of a try-out. Raises InvalidConfig when there is no such model."""
    if request.provider is not None:
        model = provider_model(request.provider)
        if model.provider is not None:
            await find_key(model.provider)
        return model
    if isinstance(config, EvalConfig) and _names_provider(config):
        model = owned_model(configured_model(config), owner=OWNER, workspace=None, submitter=None)
        if model.provider is not None:
            await find_key(model.provider)
        return model
    name = config.experiment.model_path
    if CHECKPOINT.fullmatch(name):
        return await _checkpoint(name, request.checkpoint, tryout)
    return local_model(name, seed=config.advanced.seed)


async def _checkpoint(name: str, directory: Path | None, tryout: Tryout) -> ModelRef:
    if directory is None:
        raise InvalidConfig(
            f"{name} is a checkpoint, and its files are on a server; start the server with "
            "`headrace up`, or give another model with --model"
        )
    held = await asyncio.to_thread(_read_files, directory)
    files = {path: await tryout.store(data) for path, data in held.items()}
    return ModelRef(kind="checkpoint", name=name, files=files)


def _read_files(directory: Path) -> dict[str, bytes]:
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def provider_model(request: ProviderRequest) -> ModelRef:
    """The model of a provider. Raises InvalidConfig when its name or URL is wrong."""
    ref = provider_ref(request.name, base_url=request.url, secret=request.key_env)
    return ModelRef(
        kind="provider",
        name=request.name,
        provider=ref.model_copy(update={"owner": OWNER, "timeout_s": PROVIDER_S}),
    )


async def find_key(provider: ProviderRef) -> SecretValue | None:
    """The key of a provider's API, from the environment variable that its secret names. Raises
    InvalidConfig when the variable is not set."""
    if provider.secret is None:
        return None
    value = os.environ.get(provider.secret)
    if not value:
        raise InvalidConfig(
            f"{provider.name} needs a key, and the environment variable {provider.secret} is not set; "
            "set it, or name another one with --provider-key-env"
        )
    return SecretValue(value)


async def secrets_of(config: Config) -> MemorySecrets:
    """The secrets that the config requires, from environment variables of the same names. Raises
    InvalidConfig, which names those that are not set."""
    secrets, missing = MemorySecrets(), []
    for name in config.secrets.required:
        value = os.environ.get(name)
        if value is None:
            missing.append(name)
            continue
        await secrets.put_secret(
            SecretOwner("workspace", OWNER), name, SecretValue(value), by="tryout"
        )
    if missing:
        raise InvalidConfig(
            f"the rollout requires the secrets {', '.join(missing)}; set environment variables of "
            "these names for the try-out"
        )
    return secrets


async def add_judge_keys(secrets: MemorySecrets, rollout: RolloutRef) -> None:
    """Add the keys of a rollout's judges, from environment variables with the names of their secrets.
    Raises InvalidConfig, which names those that are not set."""
    missing = []
    for rubric in rollout.rubrics:
        ref = provider_ref(rubric.model, base_url=rubric.base_url, secret=rubric.api_key_secret)
        value = os.environ.get(ref.secret) if ref.secret is not None else None
        if value is not None and ref.secret is not None:
            owner = SecretOwner("workspace", OWNER)
            await secrets.put_secret(owner, ref.secret, SecretValue(value), by="tryout")
        elif ref.secret is not None:
            missing.append(ref.secret)
    if missing:
        raise InvalidConfig(
            f"the judges need keys, and the environment variables {', '.join(sorted(set(missing)))} "
            "are not set; set them for the try-out"
        )


def sampling_params(config: Config) -> SamplingParams:
    """How the tokens of a try-out are drawn: as in the run or evaluation."""
    advanced = config.advanced
    limits: Training | EvalAdvanced
    if isinstance(config, RunConfig):
        limits, temperature = config.training, config.sampling.rollout_temperature
    else:
        limits, temperature = config.advanced, config.advanced.temperature
    return SamplingParams(
        temperature=temperature,
        max_prompt_tokens=limits.max_prompt_length,
        max_new_tokens=longest_answer(limits),
        seed=advanced.seed,
        deterministic=advanced.deterministic,
        date=advanced.date,
    )
