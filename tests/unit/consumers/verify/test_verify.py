"""A verification is requested once and answered once, in whatever order messages arrive."""

from consumers.verify.consumer import CONSUMER
from schemas.effects import Failed, RunAudited, VerifyRun
from schemas.errors import FailureCategory
from schemas.events import VerificationCompleted, VerificationRequested
from schemas.ids import verify_stream
from schemas.specs import Finding
from tests.kit.decider import given

ASKED = VerificationRequested(verification="v1", run="r1")
EFFECT = VerifyRun(verification="v1", run="r1")
STREAM = verify_stream("v1")
FOUND = Finding(kind="artifact", what="row:ab", message="is gone")


def audited(*findings: Finding) -> RunAudited:
    return RunAudited(effect=EFFECT, findings=findings, steps=4, checkpoints=2, artifacts=9)


def test_a_request_is_performed() -> None:
    given(CONSUMER).when(ASKED).then(effects=[EFFECT])


def test_an_audit_is_the_answer() -> None:
    completed = VerificationCompleted(
        verification="v1", run="r1", findings=(FOUND,), steps=4, checkpoints=2, artifacts=9
    )
    given(CONSUMER, ASKED).when(audited(FOUND), stream=STREAM).then(events=[completed])


def test_a_failed_verification_says_why() -> None:
    completed = VerificationCompleted(
        verification="v1", run="r1", error="validation_error: no model"
    )
    failed = Failed(EFFECT, FailureCategory.VALIDATION, "no model")
    given(CONSUMER, ASKED).when(failed, stream=STREAM).then(events=[completed])


def test_an_answered_verification_decides_nothing() -> None:
    completed = VerificationCompleted(verification="v1", run="r1")
    for message in (ASKED, audited(), Failed(EFFECT, FailureCategory.CRASH, "x")):
        given(CONSUMER, ASKED, completed).when(message, stream=STREAM).then()
