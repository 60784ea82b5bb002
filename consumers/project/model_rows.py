"""Turns events about trained models into rows: one for each deployment, with what it serves and what is
being loaded, and one for each upload to a model hub."""

from infra.readmodel.rows import (
    ChangeDeployment,
    ChangeHubUpload,
    ChangeNamedDeployment,
    PutDeployment,
    PutHubUpload,
    Write,
)
from infra.spine.ports.event_log import Recorded
from schemas.deployments import deployment_key
from schemas.events import (
    HubUploaded,
    HubUploadFailed,
    HubUploadRequested,
    ModelDeployed,
    ModelDeployFailed,
    ModelDeployRequested,
    ModelUndeployed,
)


def deployment_rows(recorded: Recorded) -> tuple[Write, ...]:
    """Return the row of a deployment and its changes; nothing for other events."""
    event, at = recorded.event, recorded.time
    match event:
        case ModelDeployRequested(served=served):
            asked = ChangeDeployment(
                served.key,
                at,
                pending=served.ref,
                error="",
                request=event.request,
                requested_by=recorded.actor or f"run {served.run_name}",
            )
            return (PutDeployment(served.name, served.workspace, at), asked)
        case ModelDeployed(served=served):
            deployed = ChangeDeployment(
                served.key,
                at,
                status="active",
                number=event.number,
                served=served.model_dump_json(),
                pending="",
                error="",
                request="",
                deployed_at=at,
            )
            return (PutDeployment(served.name, served.workspace, at), deployed)
        case ModelDeployFailed(deployment=name, scope=None, request=request, message=message):
            return (ChangeNamedDeployment(name, at, request, message),)
        case ModelDeployFailed(deployment=name, scope=str() as scope, message=message):
            key = deployment_key(name, scope)
            return (ChangeDeployment(key, at, pending="", error=message, request=""),)
        case ModelUndeployed(deployment=name, scope=None, request=request):
            return (ChangeNamedDeployment(name, at, request),)
        case ModelUndeployed(deployment=name, scope=str() as scope):
            key = deployment_key(name, scope)
            ended = ChangeDeployment(key, at, status="inactive", pending="", error="", request="")
            return (ended,)
        case _:
            return ()


def hub_rows(recorded: Recorded) -> tuple[Write, ...]:
    """Return the row of an upload and its changes; nothing for other events."""
    event, at = recorded.event, recorded.time
    match event:
        case HubUploadRequested(upload=upload):
            row = PutHubUpload(
                upload=upload.upload,
                run=upload.run,
                step=upload.step,
                repository=upload.repository,
                form=upload.form,
                visibility="private" if upload.private else "public",
                requested_by=recorded.actor,
                created_at=at,
            )
            return (row,)
        case HubUploaded(upload=upload, url=url, revision=revision):
            done = ChangeHubUpload(upload.upload, at, status="uploaded", url=url, revision=revision)
            return (done,)
        case HubUploadFailed(upload=upload, message=message):
            return (ChangeHubUpload(upload.upload, at, status="failed", error=message),)
        case _:
            return ()
