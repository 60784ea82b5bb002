"""Resolves `advanced.teacher` to an exact model, in the words of `experiment.model_path`."""

from infra.model_api.providers.endpoints import provider_ref
from infra.settings.model_directories import OWN_MACHINE, ModelDirectories
from producers.core.lookup import CHECKPOINT, Checkpoint, Lookup
from producers.core.models.model_ref import resolve_model
from producers.core.models.vocabularies import Vocabularies
from schemas.config import RunConfig
from schemas.errors import InvalidConfig, NotFound
from schemas.models.scratch import PREFIX
from schemas.models.teacher import SELF, TeacherRef
from schemas.sampling import PROVIDER_PREFIX, ModelRef


async def resolve_teacher(
    config: RunConfig,
    model: ModelRef,
    *,
    lookup: Lookup,
    directories: ModelDirectories = OWN_MACHINE,
    vocabularies: Vocabularies | None = None,
) -> TeacherRef | None:
    """The teacher of a run whose own model is `model`. None if the run names none, or the policy
    itself. Raises InvalidConfig when there is no such model, when it is the run's own and has no hint,
    and when its vocabulary is known to be another one; MisdirectedKey when its server may not get the
    key."""
    name = config.advanced.teacher
    if name is None or name == SELF:
        return None
    if name.startswith(PROVIDER_PREFIX):
        return _on_server(config, name)
    if CHECKPOINT.fullmatch(name) and not name.startswith(PREFIX):
        teacher = await _checkpoint(name, model, lookup=lookup)
    else:
        found = await resolve_model(
            name, seed=config.advanced.seed, lookup=lookup, directories=directories
        )
        teacher = TeacherRef(name=name, model=found.model_copy(update={"dtype": model.dtype}))
    is_own = teacher.model == model and teacher.weights is None
    if is_own and config.advanced.teacher_hint is None:
        raise InvalidConfig(
            f"{name!r} is the model that the run begins with, from which it learns nothing without a "
            "hint; name another one, or set advanced.teacher_hint"
        )
    if vocabularies is not None:
        await _refuse_other_vocabulary(teacher, model, vocabularies)
    return teacher


def _on_server(config: RunConfig, name: str) -> TeacherRef | None:
    """A model on a vLLM server as a teacher. None without a server, which has an issue already."""
    advanced = config.advanced
    if advanced.teacher_base_url is None:
        return None
    base_url, secret = advanced.teacher_base_url, advanced.teacher_api_key_secret
    ref = provider_ref(name.removeprefix(PROVIDER_PREFIX), base_url=base_url, secret=secret)
    return TeacherRef(name=name, model=ModelRef(kind="provider", name=ref.name, provider=ref))


async def _checkpoint(name: str, model: ModelRef, *, lookup: Lookup) -> TeacherRef:
    """A checkpoint as a teacher. An adapter on the run's own base model stays one. Raises InvalidConfig
    when there is no such checkpoint, and when it is a reward model."""
    try:
        found: Checkpoint = await lookup.checkpoint(name)
    except NotFound as error:
        raise InvalidConfig(error.message) from error
    whole = found.model().model_copy(update={"dtype": model.dtype})
    place = f"{found.spec.run}@{found.spec.step}"
    base = found.spec.model.model_copy(update={"dtype": model.dtype})
    if found.spec.tuning != "lora" or base != model or found.spec.state.weights is None:
        return TeacherRef(name=found.ref, model=whole, checkpoint=place)
    advanced = found.run.config.advanced
    return TeacherRef(
        name=found.ref,
        model=model,
        weights=found.spec.state.weights,
        lora_alpha=advanced.lora_alpha,
        lora_scaling=advanced.lora_scaling,
        checkpoint=place,
    )


async def _refuse_other_vocabulary(
    teacher: TeacherRef, model: ModelRef, vocabularies: Vocabularies
) -> None:
    """Raise InvalidConfig if both vocabularies can be read here and differ. The learner compares them
    too, when it has loaded both models."""
    if teacher.model == model:
        return
    theirs, ours = await vocabularies.of(teacher.model), await vocabularies.of(model)
    if theirs is None or ours is None or theirs == ours:
        return
    differing = sum(theirs.get(token) != ours.get(token) for token in {*theirs, *ours})
    raise InvalidConfig(
        f"{teacher.name!r} has another vocabulary than the model of the run ({differing} token ids "
        "differ), so it cannot read what the run samples; name a teacher with the same tokenizer, or "
        "train on its answers with algorithm = 'sft'"
    )
