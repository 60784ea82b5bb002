"""Has a teacher on a server read the samples of a group.

A server may answer otherwise tomorrow. So its log-probabilities are recorded in the artifact with which
the rewards of the group are recorded, and the learner, a replay and a verification read them there.
Nobody asks again once the group is graded.
"""

from collections.abc import Sequence

from infra.model_api.gateway.engine_errors import gather_all
from infra.ports.secrets import SecretStore
from infra.ports.teachers import Reading, Teachers
from infra.spine.runtime.places import without_place
from schemas.errors import FailureCategory, Refused, UserCodeError
from schemas.sampling import ProviderRef, SampleRecord
from schemas.sampling import Sequence as TokenSequence
from schemas.secrets.rules import how_to_set
from schemas.secrets.secret_value import SecretValue
from schemas.specs import GroupSpec

Place = tuple[int, int]
"""A row of a group: the index of its sample, and its place among the rows of the sample."""


async def ask_teacher(
    spec: GroupSpec, records: Sequence[SampleRecord], *, teachers: Teachers, secrets: SecretStore
) -> tuple[tuple[SampleRecord, ...], dict[int, str]]:
    """Return the records with the logprobs of the run's teacher in all rows that are learned, and its
    text for each of their tokens, by id. Samples that failed are not learned. Raises Refused when a row
    cannot be read, UserCodeError when the key is not set, TeacherAway and TransientError."""
    teacher = spec.template.teacher_server
    if teacher is None:
        return tuple(records), {}
    rows = {
        (record.index, number): row
        for record in records
        if record.failure is None
        for number, row in enumerate(record.sequences)
        if any(row.loss_mask[1:])
    }
    key = await _find_key(teacher, spec, secrets)

    async def read(place: Place, row: TokenSequence) -> Reading:
        index, number = place
        what = (
            f"row {number} of sample {index} of group {spec.group} (row {spec.row} of the dataset)"
        )
        if row.constrained:
            raise Refused(
                f"a teacher on a server cannot say how likely forced answers are, and {what} has one; "
                "ask for free text, or name a checkpoint as advanced.teacher"
            )
        return await teachers.read(teacher, row, key=key, what=what)

    with without_place():
        readings = await gather_all([read(*item) for item in rows.items()])
    logprobs = {place: one.logprobs for place, one in zip(rows, readings, strict=True)}
    texts = {token: text for one in readings for token, text in one.texts.items()}
    return tuple(_with_logprobs(one, logprobs) for one in records), dict(sorted(texts.items()))


def _with_logprobs(record: SampleRecord, logprobs: dict[Place, tuple[float, ...]]) -> SampleRecord:
    found = [(row, logprobs.get((record.index, n))) for n, row in enumerate(record.sequences)]
    rows = tuple(
        row if said is None else row.model_copy(update={"teacher_logprobs": said})
        for row, said in found
    )
    return record.model_copy(update={"sequences": rows})


async def _find_key(
    teacher: ProviderRef, spec: GroupSpec, secrets: SecretStore
) -> SecretValue | None:
    """The key of the teacher's server, of the workspace or the submitter of the run."""
    name, rollout = teacher.secret, spec.template.rollout
    if name is None:
        return None
    submitter = None if rollout is None or rollout.pushed else rollout.submitter
    workspace = None if rollout is None else rollout.workspace
    values = await secrets.resolve((name,), workspace=workspace, submitter=submitter)
    if name not in values:
        raise UserCodeError(
            FailureCategory.VALIDATION, how_to_set((name,), pushed=submitter is None)
        )
    return values[name]
