"""Finds what the names in a config refer to: datasets, a model, a workspace and its commits.

A name that refers to nothing becomes an issue with its key, so that all of them are reported at once.
"""

import difflib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from infra.model_api.providers.endpoints import MisdirectedKey
from infra.names import Names
from infra.ports.actor import is_confined, own_organisation, visible_workspaces
from infra.ports.secrets import SecretStore
from infra.settings.model_directories import OWN_MACHINE, ModelDirectories
from infra.settings.network_policy import NetworkPolicy
from infra.settings.vllm import Tuning
from infra.spine.ports.event_log import Cursor, EventStore, Recorded
from producers.core.datasets.registration import find as find_dataset
from producers.core.lookup import Lookup
from producers.core.models.model_facts import ModelFacts, model_facts
from producers.core.models.model_ref import resolve_model
from producers.core.models.provider_model import provider_model
from producers.core.models.teacher_ref import resolve_teacher
from producers.core.models.vocabularies import Vocabularies
from producers.core.validation.judge_issues import judge_secrets, judges_of
from producers.core.validation.reward_models import find_reward_models
from producers.core.validation.rollout_issues import SyncedCommit, synced_commits
from producers.core.validation.trajectory_issues import vocabulary_problem
from producers.core.workspaces import Workspace, Workspaces
from schemas.algorithms import DISTILLED
from schemas.config import EvalConfig, RunConfig
from schemas.errors import Conflict, InvalidConfig, Issue, NotFound
from schemas.events import CommitRequested, DatasetRegistered, WorkspaceSynced
from schemas.models.reward_model import RewardModelSpec
from schemas.models.teacher import TeacherRef
from schemas.network import NetworkAddress
from schemas.sampling import PROVIDER_PREFIX, ModelRef
from schemas.secrets.rules import how_to_set
from schemas.toml.generated_tasks import is_generated

UNKNOWN = ModelFacts()
PAGE = 1000
TELLING = (CommitRequested.type, WorkspaceSynced.type)
"""The events that tell which commits were synced."""


@dataclass(frozen=True, slots=True)
class References:
    """The objects that the names in a config refer to. A field is None if the config does not name it,
    or if it was not found, which `issues` reports. `no_workspace` is the error when the workspace that
    the request names does not exist. It is separate because a workspace is not a key of the config."""

    dataset: DatasetRegistered | None = None
    validation: DatasetRegistered | None = None
    model: ModelRef | None = None
    facts: ModelFacts = UNKNOWN
    teacher: TeacherRef | None = None
    workspace: Workspace | None = None
    owner: Workspace | None = None
    """the workspace that a request for a run without a rollout names"""
    no_workspace: NotFound | None = None
    commits: tuple[SyncedCommit, ...] = ()
    network: frozenset[NetworkAddress] = frozenset()
    """the addresses that the operator allows the workspace"""
    vllm: Tuning | None = None
    """what the vLLM servers of the platform sample: adapters, or any weights; None without vLLM"""
    reward_models: tuple[RewardModelSpec, ...] = ()
    issues: tuple[Issue, ...] = ()


@dataclass(frozen=True, slots=True)
class Requester:
    """Where a request comes from: the workspace that it names, the person whose personal secrets its
    run may use, who is None for a push, and the names of secrets that it gives for its run alone."""

    workspace: str | None = None
    submitter: str | None = None
    given: frozenset[str] = frozenset()


class ReferenceFinder:
    """Finds what a config refers to. Appends nothing and raises nothing: see `References.issues`."""

    def __init__(
        self,
        log: EventStore,
        names: Names,
        *,
        lookup: Lookup,
        workspaces: Workspaces,
        network: NetworkPolicy,
        secrets: SecretStore,
        directories: ModelDirectories = OWN_MACHINE,
        vllm: Tuning | None = None,
        vocabularies: Vocabularies | None = None,
    ) -> None:
        self._log = log
        self._names = names
        self._network = network
        self._lookup = lookup
        self._workspaces = workspaces
        self._secrets = secrets
        self._directories = directories
        self._vllm = vllm
        self._vocabularies = vocabularies

    async def find_references(
        self, config: RunConfig | EvalConfig, requester: Requester
    ) -> References:
        """Look up every name in the config, and the workspace that the request names."""
        issues: list[Issue] = []
        chosen, owner, missing = None, None, None
        later: list[Issue] = []
        if config.experiment.rollout is not None:
            chosen, missing = await self._workspace(requester.workspace, later)
        elif requester.workspace is not None and is_confined():
            owner, missing = await self._workspace(requester.workspace, later)
        named = chosen or owner
        place = named.id if named else None
        lookup = self._lookup.within(place)
        dataset = await self._dataset(
            config.experiment.dataset, "experiment.dataset", issues, place
        )
        validation = None
        if isinstance(config, RunConfig) and config.advanced.validation_dataset is not None:
            name = config.advanced.validation_dataset
            validation = await self._dataset(name, "advanced.validation_dataset", issues, place)
        model, facts = await self._model(config, issues, lookup)
        teacher = None
        if model is not None and isinstance(config, RunConfig):
            teacher = await self._teacher(config, model, issues, lookup)
        issues += later
        if dataset is not None and model is not None:
            problem = await vocabulary_problem(dataset, model, self._vocabularies)
            issues += [Issue("experiment.model_path", problem)] if problem else []
        commits: tuple[SyncedCommit, ...] = ()
        if chosen is not None:
            commits = await self._commits(chosen)
            await self._find_secrets(config, chosen, requester, issues)
            judges = judge_secrets(judges_of(config, commits))
            keys = {f"{key}.api_key_secret": secret for key, secret in judges.items()}
            if model is not None and model.provider is not None and model.provider.secret:
                keys["advanced.api_key_secret"] = model.provider.secret
            if teacher is not None and teacher.server is not None and teacher.server.secret:
                keys["advanced.teacher_api_key_secret"] = teacher.server.secret
            if keys:
                issues += [i async for i in self._missing_keys(keys, chosen, requester.submitter)]
        return References(
            dataset=dataset,
            validation=validation,
            model=model,
            facts=facts,
            teacher=teacher,
            workspace=chosen,
            owner=owner,
            no_workspace=missing,
            commits=commits,
            network=self._network.addresses_of(chosen.setting_name) if chosen else frozenset(),
            vllm=self._vllm,
            reward_models=await find_reward_models(config, lookup, chosen, issues),
            issues=tuple(issues),
        )

    async def _dataset(
        self, ref: str, key: str, issues: list[Issue], workspace: str | None
    ) -> DatasetRegistered | None:
        try:
            return await find_dataset(self._log, self._names, ref, workspace=workspace)
        except Conflict as error:
            issues.append(Issue(key, error.message))
        except NotFound as error:
            close = None if is_generated(ref) else await self._close_dataset(ref)
            issues.append(Issue(key, error.message, close))
        except InvalidConfig as error:
            issues.append(Issue(key, error.message))
        return None

    async def _close_dataset(self, ref: str) -> str | None:
        """The name of a dataset that is similar to `ref`, and that the sender may use."""
        visible = visible_workspaces()
        scopes = None if visible is None else [*visible, own_organisation(), ""]
        known = await self._names.all_names("dataset", scopes=scopes)
        for name in difflib.get_close_matches(ref, {taken.name for taken in known}, n=3):
            try:
                await find_dataset(self._log, self._names, name)
            except Conflict:
                return name
            except NotFound:
                continue
            return name
        return None

    async def _model(
        self, config: RunConfig | EvalConfig, issues: list[Issue], lookup: Lookup
    ) -> tuple[ModelRef | None, ModelFacts]:
        path, seed = config.experiment.model_path, config.advanced.seed
        try:
            if path.startswith(PROVIDER_PREFIX):  # in a run, it has an issue already
                found = provider_model(config) if isinstance(config, EvalConfig) else None
                return found, UNKNOWN
            model = await resolve_model(
                path, seed=seed, lookup=lookup, directories=self._directories
            )
            if isinstance(config, RunConfig):
                model = model.model_copy(update={"dtype": config.advanced.precision})
            return model, await model_facts(model, lookup)
        except MisdirectedKey as error:
            issues.append(Issue("advanced.api_key_secret", error.message))
            return None, ModelFacts()
        except InvalidConfig as error:
            suggestion = error.issues[0].did_you_mean if error.issues else None
            issues.append(Issue("experiment.model_path", error.message, suggestion))
            return None, ModelFacts()

    async def _teacher(
        self, config: RunConfig, model: ModelRef, issues: list[Issue], lookup: Lookup
    ) -> TeacherRef | None:
        if config.advanced.algorithm not in DISTILLED:
            return None
        try:
            teacher = await resolve_teacher(
                config,
                model,
                lookup=lookup,
                directories=self._directories,
                vocabularies=self._vocabularies,
            )
            if teacher is not None and teacher.model.kind == "hub" and teacher.model != model:
                await model_facts(teacher.model, lookup)  # raises if the hub does not have it
            return teacher
        except MisdirectedKey as error:
            issues.append(Issue("advanced.teacher_api_key_secret", error.message))
            return None
        except InvalidConfig as error:
            suggestion = error.issues[0].did_you_mean if error.issues else None
            key = "teacher" if config.advanced.teacher_base_url is None else "teacher_base_url"
            issues.append(Issue(f"advanced.{key}", error.message, suggestion))
            return None

    async def _workspace(
        self, ref: str | None, issues: list[Issue]
    ) -> tuple[Workspace | None, NotFound | None]:
        try:
            return await self._workspaces.choose(ref), None
        except NotFound as error:
            return None, error
        except InvalidConfig as error:
            issues.extend(error.issues)
            return None, None

    async def _find_secrets(
        self,
        config: RunConfig | EvalConfig,
        workspace: Workspace,
        requester: Requester,
        issues: list[Issue],
    ) -> None:
        """Report the required secrets that are neither given nor set. No value is read."""
        submitter = requester.submitter
        wanted = [name for name in config.secrets.required if name not in requester.given]
        if missing := await self._secrets.missing(
            wanted, workspace=workspace.id, submitter=submitter
        ):
            issues.append(Issue("secrets.required", how_to_set(missing, pushed=submitter is None)))

    async def _missing_keys(
        self, keys: Mapping[str, str], workspace: Workspace, submitter: str | None
    ) -> AsyncIterator[Issue]:
        """Report the judges, the provider's model and the teacher whose keys are not set. `keys` are the
        names of secrets by the keys of the config. No value is read."""
        missing = await self._secrets.missing(
            tuple(sorted(set(keys.values()))), workspace=workspace.id, submitter=submitter
        )
        for key, secret in keys.items():
            if secret in missing:
                how = how_to_set([secret], pushed=submitter is None)
                yield Issue(key, f"the model needs a key: {how}")

    async def _commits(self, workspace: Workspace) -> tuple[SyncedCommit, ...]:
        """The commits of a workspace that were synced. Its other events are not read, because each
        request adds some."""
        found: list[Recorded] = []
        after = Cursor()
        while page := await self._log.read(workspace.id, after=after, limit=PAGE, types=TELLING):
            found += page
            after = page[-1].cursor
        return tuple(synced_commits(found))
