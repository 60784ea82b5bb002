"""Models that others use: a LoRA checkpoint that is served under a name, on top of its base model, and
a checkpoint that is uploaded to a model hub."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from schemas.ids import HEADRACE, derive_id
from schemas.sampling import Day, LoraScaling, ModelRef, PolicyRef, Value

NAME = r"^[a-z0-9][a-z0-9_-]{0,62}$"
NAME_RULE = "1 to 63 lower-case letters, digits, - and _, the first a letter or a digit"

NO_WORKSPACE = "-"
"""Written in the place of a workspace for a deployment that belongs to none."""

CHECKPOINT_NAME = re.compile(r"^(?P<run>[^@\s/:]+)-step-(?P<step>[0-9]{1,9})$")
"""A checkpoint as the name of a model: RUN-step-N is RUN@N."""

DeploymentName = Annotated[str, StringConstraints(pattern=NAME)]


class ServedModel(Value):
    """A checkpoint as it is served. Clients call it `model_name`. `base_name` is how users name its
    base model, and `model` is the base itself. `reward` is the held-out reward of the step, if it
    was measured. `workspace` is the one whose API keys may use it (None: only keys of all
    workspaces)."""

    name: DeploymentName
    base_name: str = Field(min_length=1, max_length=512)
    model: ModelRef
    policy: PolicyRef
    lora_alpha: float
    lora_scaling: LoraScaling | None = Field(default=None, exclude_if=lambda value: value is None)
    run: str
    run_name: str
    step: int = Field(ge=0)
    reward: float | None = None
    workspace: str | None = None
    date: Day | None = None

    @property
    def key(self) -> str:
        """The deployment that serves it. Every version of a name in a workspace has the same key."""
        return deployment_key(self.name, self.workspace)

    @property
    def model_name(self) -> str:
        """How clients call the model, as long as they see only one deployment of this name."""
        return f"{self.base_name}:{self.name}"

    @property
    def full_name(self) -> str:
        """How its use is counted, and a name that means this deployment whatever others have its name:
        BASE:WORKSPACE/NAME with the id of the workspace, and BASE:NAME for one of no workspace."""
        return f"{self.base_name}:{self.key}"

    @property
    def ref(self) -> str:
        return f"{self.run_name}@{self.step}"

    @property
    def checkpoint_model(self) -> str:
        """Another name of the model, which follows from its checkpoint."""
        return f"{self.base_name}:{checkpoint_name(self.run_name, self.step)}"

    @property
    def base_key(self) -> str:
        """Identifies the weights of the base model."""
        return derive_id(HEADRACE, f"base/{self.model.model_dump_json()}").hex


@dataclass(frozen=True, slots=True)
class ActiveModel:
    """A model that is served, and the name of its workspace, if it belongs to one."""

    served: ServedModel
    workspace_name: str | None = None


def in_place(place: str, workspace: str | None, workspace_name: str | None) -> bool:
    """Whether the first part of WORKSPACE/NAME names a workspace: by its id or its name, or none."""
    if workspace is None:
        return place == NO_WORKSPACE
    return place in (workspace, workspace_name)


def checkpoint_name(run: str, step: int) -> str:
    """A checkpoint of a run (its name) as the name of a model."""
    return f"{run}-step-{step}"


def ref_of_name(text: str) -> str:
    """RUN@N for RUN-step-N, and every other text as it is."""
    found = CHECKPOINT_NAME.fullmatch(text)
    return text if found is None else f"{found['run']}@{int(found['step'])}"


def deployment_key(name: str, workspace: str | None) -> str:
    """Identifies a deployment: its name is unique in its workspace (an id). WORKSPACE/NAME, and NAME for
    a deployment of no workspace."""
    return f"{workspace}/{name}" if workspace else name


def deployment_id(key: str) -> str:
    """The id of the deployment with a key, which events and effects have in the place of a run."""
    return derive_id(HEADRACE, f"deployment/{key}").hex[:16]


def is_deployment_name(text: str) -> bool:
    """Whether a deployment may have this name."""
    return re.fullmatch(NAME, text) is not None


def shown_base_name(model_path: str) -> str:
    """The name of a base model in the names of its deployments. Of a directory only the last part is
    shown, because its path says how the server's disk is organised."""
    if not model_path.startswith(("/", "~", ".")):
        return model_path
    return model_path.rstrip("/").rpartition("/")[2] or "model"


def other_base(served: ServedModel, other: ServedModel, *, is_visible: bool) -> str:
    """The text for a checkpoint of another base model than a deployment has. That of a workspace which
    the reader may not see (not `is_visible`) is not named."""
    named = f"the deployment {other.name} ({other.base_name})"
    return (
        f"{served.ref} is trained on another base model ({served.base_name}) than "
        f"{named if is_visible else 'a deployment of another workspace'}, and one base is served at a "
        "time; undeploy what is deployed first"
    )


REPOSITORY = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}$"
MAX_CARD = 32_768
"""The most characters of a model card."""

HubForm = Literal["adapter", "merged", "model"]
"""`adapter`: the LoRA adapter. `merged`: its base model with the adapter added. `model`: all weights of
a checkpoint with full tuning."""


class HubUpload(Value):
    """An upload to a model hub. `card` is the README.md of the repository. `secret` names the secret
    that holds the hub's API key, of `submitter` or of `workspace`."""

    upload: str
    run: str
    run_name: str
    step: int = Field(ge=0)
    repository: Annotated[str, StringConstraints(pattern=REPOSITORY)]
    form: HubForm
    private: bool
    card: str = Field(max_length=MAX_CARD)
    secret: str
    workspace: str | None = None
    submitter: str | None = None

    @property
    def ref(self) -> str:
        return f"{self.run_name}@{self.step}"
