"""The publish consumer: an upload is uploaded once and ends once, and its upload loads with PEFT."""

from pathlib import Path

from consumers.deploy.publish import CONSUMER
from schemas.deployments import HubUpload
from schemas.effects import CheckpointUploaded, Failed, UploadCheckpoint
from schemas.errors import FailureCategory
from schemas.events import (
    HubUploadCancelRequested,
    HubUploaded,
    HubUploadFailed,
    HubUploadRequested,
)
from schemas.ids import hub_stream
from tests.kit.decider import given

STREAM = hub_stream("p1")
UPLOAD = HubUpload(
    upload="p1",
    run="r1",
    run_name="calm-otter",
    step=3,
    repository="org/sums",
    form="adapter",
    private=True,
    card="---\n---\n# sums\n",
    secret="HF_TOKEN",
)
ASKED = HubUploadRequested(upload=UPLOAD)
EFFECT = UploadCheckpoint(upload=UPLOAD)
DONE = HubUploaded(upload=UPLOAD, url="https://hub/org/sums", revision="c" * 40)
FAILED = HubUploadFailed(upload=UPLOAD, message="the hub answered 403: no; ask for the right")


def uploaded() -> CheckpointUploaded:
    return CheckpointUploaded(EFFECT, url=DONE.url, revision=DONE.revision)


def failed(effect: UploadCheckpoint = EFFECT) -> Failed:
    return Failed(effect, FailureCategory.VALIDATION, FAILED.message)


def test_an_upload_is_uploaded_and_its_commit_recorded() -> None:
    given(CONSUMER).when(ASKED).then(effects=[EFFECT])
    given(CONSUMER, ASKED).when(uploaded(), stream=STREAM).then(events=[DONE])


def test_a_request_that_comes_again_is_the_same_effect_or_nothing() -> None:
    given(CONSUMER, ASKED).when(ASKED).then(effects=[EFFECT])
    for end in (DONE, FAILED):
        given(CONSUMER, ASKED, end).when(ASKED).then()
        given(CONSUMER, ASKED, end).when(uploaded(), stream=STREAM).then()
        given(CONSUMER, ASKED, end).when(failed(), stream=STREAM).then()


def test_a_refusal_is_recorded_with_the_words_of_the_hub() -> None:
    given(CONSUMER, ASKED).when(failed(), stream=STREAM).then(events=[FAILED])


def test_a_cancelled_upload_ends_once_and_its_effect_with_it() -> None:
    cancel = HubUploadCancelRequested(upload=UPLOAD)
    ended = HubUploadFailed(upload=UPLOAD, message="the upload was cancelled")
    given(CONSUMER, ASKED).when(cancel).then(events=[ended])
    assert ended.gate == "closed", "no effect of a closed upload is claimed"
    given(CONSUMER, ASKED, cancel, ended).when(cancel).then()
    given(CONSUMER, ASKED, cancel, ended).when(uploaded(), stream=STREAM).then()
    given(CONSUMER, ASKED, DONE).when(cancel).then()


def test_no_event_and_no_effect_holds_a_token(tmp_path: Path) -> None:
    for value in (ASKED, DONE, FAILED, EFFECT):
        fields = value.model_dump()
        assert "token" not in str(fields).lower().replace("hf_token", "")
