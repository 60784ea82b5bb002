"""The process that serves deployments is the same in Compose and on Kubernetes."""

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from tests.architecture.test_deploy import LOGIN, compose, ours

ROOT = Path(__file__).resolve().parents[2]
SERVICE = "deploy"


def manifests() -> dict[str, dict[str, Any]]:
    """Kind -> the document of the Kubernetes example."""
    text = (ROOT / "deploy" / "kubernetes" / "serving.yaml").read_text()
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def test_on_kubernetes_it_runs_the_same_command_with_the_same_settings() -> None:
    about = ours()[SERVICE]
    pod = manifests()["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == about["command"]
    assert container["image"] == about["image"]
    text = (ROOT / "deploy" / "kubernetes" / "serving.yaml").read_text()
    given = {one["name"] for one in container["env"]} | set(compose()["x-platform"])
    assert set(about["environment"]) <= given
    named = set(compose()["x-platform"]) - {"HEADRACE_GIT_ALLOW", "OTEL_EXPORTER_OTLP_ENDPOINT"}
    named |= set(LOGIN)
    assert not [name for name in named if f"{name}=" not in text], "the secret lacks a setting"
    (kept,) = [volume.partition(":")[2] for volume in about["volumes"]]
    assert kept in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_it_listens_at_the_address_of_its_pod_where_only_the_api_reaches_it() -> None:
    deployment, policy = manifests()["Deployment"], manifests()["NetworkPolicy"]["spec"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    settings = {one["name"]: one for one in container["env"]}
    assert settings["POD_IP"]["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    url = settings["HEADRACE_SERVING_URL"]["value"]
    assert url.startswith("http://$(POD_IP):")
    port = int(url.rpartition(":")[2])
    assert port == urlsplit(ours()[SERVICE]["environment"]["HEADRACE_SERVING_URL"]).port
    assert [one["containerPort"] for one in container["ports"]] == [port]
    names = [one["name"] for one in container["env"]]
    assert names.index("POD_IP") < names.index("HEADRACE_SERVING_URL"), "or it is not replaced"
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"] == labels
    (rule,) = policy["ingress"]
    (source,) = rule["from"]
    assert source["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "headrace-api"}
    assert [one["port"] for one in rule["ports"]] == ["serving"]


def test_it_is_confined() -> None:
    pod = manifests()["Deployment"]["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
