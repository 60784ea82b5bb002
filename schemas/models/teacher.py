"""Which model teaches a run that distils: a value of the run's request, which never changes."""

from pydantic import Field

from schemas.artifact_refs import ArtifactRef
from schemas.errors import Refused
from schemas.sampling import LoraScaling, ModelRef, ProviderRef, Value

SELF = "self"
"""The value of `advanced.teacher` that names the policy itself."""

LONGEST_TEXT = 64
"""Characters that are kept of the text which a teacher on a server has for a token."""


GROUND_TRUTH = "{ground_truth}"
"""The place in `advanced.teacher_hint` that the label of a dataset row takes."""


def fill_hint(hint: str, label: str | None) -> str:
    """A hint with the label of a row in its place. Raises Refused when the row has no label."""
    if GROUND_TRUTH not in hint:
        return hint
    if label is None:
        raise Refused(
            f"advanced.teacher_hint names {GROUND_TRUTH}, and a row of the dataset has none; add a "
            "column ground_truth, or write a hint without it"
        )
    return hint.replace(GROUND_TRUTH, label)


class TeacherRef(Value):
    """The model whose distribution a run learns. `name` is how the config names it. With `weights`, an
    adapter, the teacher is `model` with this adapter on it. A checkpoint of the run's own base model is
    one, so that its base is not loaded a second time. `checkpoint` is `<run id>@<step>`, if the teacher
    is one. A model of a provider is read on its own server, and its log-probabilities are part of the
    samples."""

    name: str
    model: ModelRef
    weights: ArtifactRef | None = None
    checkpoint: str | None = None
    lora_alpha: float = 32.0
    lora_scaling: LoraScaling | None = Field(default=None, exclude_if=lambda value: value is None)

    @property
    def server(self) -> ProviderRef | None:
        """The server that has the teacher. None if the learner computes it."""
        return self.model.provider
