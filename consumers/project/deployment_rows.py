"""Turns events about deployments into rows: one for each name, with what it serves and what is being
loaded."""

from infra.ports.event_log import Recorded
from infra.readmodel.rows import ChangeDeployment, PutDeployment, Write
from schemas.events import (
    ModelDeployed,
    ModelDeployFailed,
    ModelDeployRequested,
    ModelUndeployed,
)


def deployment_rows(recorded: Recorded) -> tuple[Write, ...]:
    """Return the row of a deployment and its changes; nothing for other events."""
    event, at = recorded.event, recorded.time
    match event:
        case ModelDeployRequested(deployment=name, served=served):
            asked = ChangeDeployment(
                name,
                at,
                pending=served.ref,
                error="",
                requested_by=recorded.actor or f"run {served.run_name}",
            )
            return (PutDeployment(name, served.workspace, at), asked)
        case ModelDeployed(deployment=name, served=served):
            deployed = ChangeDeployment(
                name,
                at,
                status="active",
                number=event.number,
                served=served.model_dump_json(),
                pending="",
                error="",
                deployed_at=at,
            )
            return (PutDeployment(name, served.workspace, at), deployed)
        case ModelDeployFailed(deployment=name, message=message):
            return (ChangeDeployment(name, at, pending="", error=message),)
        case ModelUndeployed(deployment=name):
            return (ChangeDeployment(name, at, status="inactive", pending="", error=""),)
        case _:
            return ()
