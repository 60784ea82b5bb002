"""The JSON documents that a try-out prints: one per line, and one per sample that was tried."""

from consumers.process.tryout import TriedRow
from schemas.datasets import DatasetRow
from schemas.models.openai_messages import openai_message
from schemas.sampling import Grade, SampleOutput, SampleRecord

Json = dict[str, object]


def sample_documents(tried: TriedRow, row: DatasetRow) -> list[Json]:
    """One document per sample of a row, in the order of their index."""
    grades = {grade.index: grade for grade in tried.grades}
    grader = output_document(tried.grader_output)
    return [
        _document(tried.row, record, grades.get(record.index), row)
        | {"grader": grader, "judgements": _judgements(tried, record.index)}
        for record in tried.samples
    ]


def _judgements(tried: TriedRow, index: int) -> list[Json]:
    return [one.model_dump(exclude={"index"}) for one in tried.judgements if one.index == index]


def _document(number: int, record: SampleRecord, grade: Grade | None, row: DatasetRow) -> Json:
    failure = record.failure or (grade.failure if grade else None)
    counted = Grade(index=record.index, reward=grade.reward if grade else None, failure=failure)
    output = record.output or SampleOutput()
    messages = [openai_message(message) for message in record.messages]
    prompt = len(row.prompt) if record.messages[: len(row.prompt)] == row.prompt else 0
    return {
        "row": number,
        "sample": record.index,
        "reward": counted.reward,
        "counted_reward": counted.counted_reward,
        "parts": dict(grade.parts) if grade else {},
        "error": f"{failure.category}: {failure.message}" if failure else None,
        "stdout": output.stdout,
        "traceback": output.traceback,
        "files": {name: ref.size for name, ref in output.files.items()},
        "is_cut": output.is_cut,
        "prompt": [openai_message(message) for message in row.prompt],
        "turns": messages[prompt:],
        "num_turns": record.num_turns,
        "label": row.label,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "truncated": record.truncated,
        "usd": record.usd,
    }


def output_document(output: SampleOutput | None) -> Json | None:
    """The text that a grader left behind, or None when it left none."""
    if output is None:
        return None
    return {"stdout": output.stdout, "traceback": output.traceback, "is_cut": output.is_cut}
