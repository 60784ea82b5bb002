"""Which model teaches a run that distils: a value of the run's request, which never changes."""

from pydantic import Field

from schemas.artifact_refs import ArtifactRef
from schemas.sampling import LoraScaling, ModelRef, Value

SELF = "self"
"""The value of `advanced.teacher` that names the policy itself."""


class TeacherRef(Value):
    """The model whose distribution a run learns. `name` is how the config names it. With `weights`, an
    adapter, the teacher is `model` with this adapter on it. A checkpoint of the run's own base model is
    one, so that its base is not loaded a second time. `checkpoint` is `<run id>@<step>`, if the teacher
    is one."""

    name: str
    model: ModelRef
    weights: ArtifactRef | None = None
    checkpoint: str | None = None
    lora_alpha: float = 32.0
    lora_scaling: LoraScaling | None = Field(default=None, exclude_if=lambda value: value is None)
