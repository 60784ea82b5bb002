"""Has the judges of a run score the samples of a group.

Each judgement is recorded as soon as it is made, under a key of its question. So a group that is graded
again, after a crash or while a judge is away, asks only for what is missing. A judge that gives no score
leaves the sample without a reward, and never with a wrong one.
"""

import asyncio
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from consumers.judging.questions import (
    Material,
    chosen_material,
    first_messages,
    group_material,
    material,
    next_messages,
    question_key,
    schema_of,
    shuffled_order,
)
from consumers.judging.scores import Score, Unusable, read_score, read_scores
from infra.failpoints import hit
from infra.model_api.providers.endpoints import provider_ref
from infra.ports.judges import JudgementRecord, Judges
from infra.ports.secrets import SecretStore
from infra.ports.services import Datasets
from infra.spine.runtime.places import without_place
from schemas.datasets import DatasetRow
from schemas.errors import FailureCategory, Refused, UserCodeError
from schemas.sampling import Grade, Judgement, JudgeUsage, SampleFailure, SampleRecord
from schemas.secrets.masking import NO_MASKS, Masks
from schemas.secrets.rules import how_to_set
from schemas.secrets.secret_value import SecretValue
from schemas.specs import GroupSpec, JudgeBudget, RolloutRef, RubricSpec

MOST_ASKS = 3
"""How often a judge is asked for one judgement, until its answer can be used."""

FENCE_BYTES = 16
"""Random bytes of the fence around the material. Each request draws new ones. Nothing is computed from
them: a judgement is recorded, and never asked for again."""

AT_ONCE = 16
"""How many judgements of a group are made at the same time."""


class BudgetSpent(UserCodeError):
    """The judges of a run may not be asked any more."""

    def __init__(self, what: str) -> None:
        super().__init__(
            FailureCategory.BUDGET, f"the run has used {what}; raise it, or leave it out"
        )


@dataclass(frozen=True, slots=True)
class Question:
    """The subject of one question to a judge: what it reads, and the sample that it scores, or the
    samples in the order of their numbers in it. `keys` are those of the records of their judgements."""

    rubric: RubricSpec
    indexes: tuple[int, ...]
    parts: Material
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JudgePorts:
    """The ports to judges, and to what they are asked about."""

    datasets: Datasets
    secrets: SecretStore
    judges: Judges
    judgements: JudgementRecord


async def judge_group(
    spec: GroupSpec,
    graded: Sequence[tuple[SampleRecord, Grade]],
    questions: Mapping[int, Mapping[str, str]],
    ports: JudgePorts,
) -> tuple[tuple[Grade, ...], tuple[Judgement, ...]]:
    """Return the grades with the scores of the run's judges, and all judgements. Samples without a
    reward are not judged. `questions` are the texts of the entry point's rubrics, by sample and rubric.
    If the judges cannot be asked at all, no sample has a reward. Raises JudgeAway and TransientError,
    after which the same call asks for what is missing."""
    rollout = spec.template.rollout
    if rollout is None or not rollout.rubrics or all(g.reward is None for _, g in graded):
        return tuple(grade for _, grade in graded), ()
    row = (await ports.datasets.rows(spec.template.dataset))[spec.row]
    judged = [record for record, grade in graded if grade.reward is not None]
    asked = tuple(
        question
        for rubric in rollout.rubrics
        for question in _questions(spec, rubric, judged, questions, row)
    )
    try:
        owner = spec.template.run or spec.owner
        panel = Panel(owner, rollout.judge, await judge_keys(rollout, ports.secrets), ports)
        with without_place():
            judgements = await panel.judge(asked)
    except (UserCodeError, Refused) as error:
        return tuple(_without_judges(grade, error) for _, grade in graded), ()
    return tuple(
        add_scores(grade, rollout.rubrics, [j for j in judgements if j.index == grade.index])
        for _, grade in graded
    ), judgements


def _questions(
    spec: GroupSpec,
    rubric: RubricSpec,
    records: Sequence[SampleRecord],
    texts: Mapping[int, Mapping[str, str]],
    row: DatasetRow,
) -> Iterator[Question]:
    """The questions about these samples: one about each, or one about all of them."""
    if rubric.scope == "group":
        by_index = {record.index: record for record in records}
        order = shuffled_order(tuple(by_index), group=spec.group, rubric=rubric.name)
        parts = group_material([by_index[index] for index in order], row)
        keys = tuple(question_key(spec.group, index, rubric, parts) for index in order)
        yield Question(rubric, order, parts, keys)
        return
    for record in records:
        text = texts.get(record.index, {}).get(rubric.name)
        parts = material(record, row) if text is None else chosen_material(text)
        key = question_key(spec.group, record.index, rubric, parts)
        yield Question(rubric, (record.index,), parts, (key,))


def _without_judges(grade: Grade, error: UserCodeError | Refused) -> Grade:
    if grade.reward is None:
        return grade
    category = error.category if isinstance(error, UserCodeError) else FailureCategory.VALIDATION
    failure = SampleFailure(category=category, message=error.message)
    return grade.model_copy(update={"reward": None, "failure": failure})


class Panel:
    """The judges of `owner`, which is a run with its validations or an evaluation. `keys` are theirs by
    the names of the rubrics."""

    def __init__(
        self,
        owner: str,
        budget: JudgeBudget | None,
        keys: Mapping[str, SecretValue | None],
        ports: JudgePorts,
    ) -> None:
        self._owner = owner
        self._budget = budget or JudgeBudget()
        self._keys = keys
        self._judges = ports.judges
        self._record = ports.judgements
        self._room = asyncio.Semaphore(AT_ONCE)
        self._failed: Exception | None = None

    async def judge(self, questions: Sequence[Question]) -> tuple[Judgement, ...]:
        """Return the judgements by sample, and those of a sample in the order of the questions. Raises
        the first error of a judge or of the budget, after the requests that were open have been
        recorded."""
        keys = [key for question in questions for key in question.keys]
        found = dict(await self._record.find_judgements(self._owner, keys))
        missing = [question for question in questions if not found.keys() >= {*question.keys}]
        for made in await asyncio.gather(*(self._make(question) for question in missing)):
            found |= made
        if self._failed is not None:
            raise self._failed
        return tuple(sorted((found[key] for key in keys), key=lambda judgement: judgement.index))

    async def _make(self, question: Question) -> Mapping[str, Judgement]:
        """Make and record the judgements of one question. Returns none if an error ended this or
        another one before."""
        async with self._room:
            if self._failed is not None:
                return {}
            try:
                judgements = await self._ask(question)
                hit("judge.answered")
                by_key = dict(zip(question.keys, judgements, strict=True))
                kept = await self._record.record(self._owner, by_key)
            except Exception as error:  # `judge` raises it, once the open requests are recorded
                self._failed = self._failed or error
                return {}
            hit("judge.recorded")
            return kept

    async def _ask(self, question: Question) -> tuple[Judgement, ...]:
        rubric = question.rubric
        used, problem, again = JudgeUsage(), "", ("", "")
        key = self._keys.get(rubric.name)
        # A server that was given the key may quote it.
        masks = Masks({rubric.api_key_secret or "key": key.reveal()}) if key else NO_MASKS
        for asked in range(MOST_ASKS):
            fence = secrets.token_hex(FENCE_BYTES)
            messages = first_messages(rubric, question.parts, fence=fence)
            if asked:
                messages = next_messages(rubric, messages, *again)
            if spent := await self._record.reserve(self._owner, self._budget):
                raise BudgetSpent(spent)
            answer = await self._judges.ask(rubric, messages, key=key, schema=schema_of(rubric))
            used += answer.usage
            await self._record.spend(self._owner, answer.usage)
            if answer.refusal is not None:
                refusal = masks.text(answer.refusal)
                problem = f"the judge {rubric.model} refuses the question: {refusal}"
                break
            text = masks.text(answer.text)
            read = _read(question, text, finish_reason=answer.finish_reason)
            if not isinstance(read, Unusable):
                return _judgements(question, used, read)
            problem = (
                f"the judge {rubric.model} gave no score in {MOST_ASKS} answers: {read.problem}"
            )
            again = (text, read.problem)
        return _judgements(question, used, problem)


def _read(question: Question, text: str, *, finish_reason: str) -> tuple[Score, ...] | Unusable:
    rubric = question.rubric
    material = "\n".join(text for _, text in question.parts)
    if rubric.scope == "group":
        return read_scores(
            text,
            rubric,
            num_answers=len(question.indexes),
            material=material,
            finish_reason=finish_reason,
        )
    read = read_score(text, rubric, material=material, finish_reason=finish_reason)
    return read if isinstance(read, Unusable) else (read,)


def _judgements(
    question: Question, used: JudgeUsage, found: tuple[Score, ...] | str
) -> tuple[Judgement, ...]:
    """The judgements of a question, from its scores or from the reason why there are none. The first
    sample's has the usage."""
    scores = [None] * len(question.indexes) if isinstance(found, str) else found
    return tuple(
        Judgement(
            index=index,
            rubric=question.rubric.name,
            model=question.rubric.model,
            score=score.value if score else None,
            explanation=score.explanation if score else "",
            problem=found if isinstance(found, str) else None,
            usage=used if index == min(question.indexes) else JudgeUsage(),
        )
        for index, score in zip(question.indexes, scores, strict=True)
    )


def add_scores(
    grade: Grade, rubrics: Sequence[RubricSpec], judgements: Sequence[Judgement]
) -> Grade:
    """Return a grade with the weighted scores of a sample in its reward. Without one of them it has no
    reward."""
    if grade.reward is None or not judgements:
        return grade
    by_rubric = {judgement.rubric: judgement for judgement in judgements}
    reward, parts = grade.reward, dict(grade.parts)
    for rubric in rubrics:
        found = by_rubric[rubric.name]
        if found.score is None:
            failure = SampleFailure(
                category=FailureCategory.GRADER, message=found.problem or "the judge gave no score"
            )
            return grade.model_copy(update={"reward": None, "failure": failure})
        parts[rubric.name] = found.score
        reward += rubric.weight * found.score
    return grade.model_copy(update={"reward": reward, "parts": parts})


def _secret_of(rubric: RubricSpec) -> str | None:
    """Return the name of the secret with the key of a rubric's judge, or None if it needs none. Raises
    InvalidConfig when there is no such provider."""
    ref = provider_ref(rubric.model, base_url=rubric.base_url, secret=rubric.api_key_secret)
    return ref.secret


async def judge_keys(rollout: RolloutRef, secrets: SecretStore) -> Mapping[str, SecretValue | None]:
    """Return the keys of the judges by the names of their rubrics. They go to the judge's provider
    alone, and never enter a sandbox. Raises UserCodeError, which names the secrets that are not set, and
    InvalidConfig."""
    names = {rubric.name: _secret_of(rubric) for rubric in rollout.rubrics}
    wanted = tuple(sorted({name for name in names.values() if name is not None}))
    if not wanted:
        return dict.fromkeys(names)
    submitter = None if rollout.pushed else rollout.submitter
    values = await secrets.resolve(wanted, workspace=rollout.workspace, submitter=submitter)
    if missing := [name for name in wanted if name not in values]:
        raise UserCodeError(
            FailureCategory.VALIDATION, how_to_set(missing, pushed=submitter is None)
        )
    return {rubric: values[name] if name else None for rubric, name in names.items()}
