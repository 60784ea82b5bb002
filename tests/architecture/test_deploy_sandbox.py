"""The deployed sandbox service holds nothing and reaches nothing, in Compose and on Kubernetes."""

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from consumers.process.ports import port_names
from consumers.registry import CONTROL_CONSUMERS, lanes_of, load
from infra.settings.sandbox_service import PEM, URL, VARIABLES, SandboxAddress, listen_address
from infra.spine.runtime.hosting import Hosting
from schemas.ids import WorkerId
from tests.architecture.test_deploy import SANDBOX, compose, hosted, ours, services

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = "packages"
CLIENTS = {"api", "sync", "rollout", "grade", "regrade"}
OPENED = {"clone", "clone3", "unshare", "mount", "umount2", "pivot_root", "sethostname"}


def manifests() -> dict[str, dict[str, Any]]:
    """Kind -> the document of the Kubernetes example."""
    text = (ROOT / "deploy" / "kubernetes" / "sandbox.yaml").read_text()
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


@cache
def names_of_processes_with_user_code() -> set[str]:
    """The services whose consumers discover, run or grade user code."""
    hosts = {name: names for name, names in hosted().items() if names != ["relay"]}
    hosts["api"] = list(CONTROL_CONSUMERS)
    found = set()
    for name, of in hosts.items():
        consumers = tuple(map(load, of))
        if "user" in port_names(Hosting(WorkerId(name), consumers, lanes_of(consumers))):
            found.add(name)
    return found


def test_the_service_has_no_credentials_and_no_network_but_that_of_its_clients() -> None:
    about = services()[SANDBOX]
    assert set(about["environment"]) == {
        *(
            "HEADRACE_SANDBOX",
            "HEADRACE_PACKAGE_INDEX",
            "HEADRACE_PACKAGE_HOSTS",
        ),
        *("HEADRACE_ENVIRONMENTS", "HTTPS_PROXY", "HTTP_PROXY"),
    }
    assert about["env_file"] == f"deploy/secrets/{SANDBOX}.env"
    assert about["networks"] == [SANDBOX]
    assert "ports" not in about
    (volume,) = about["volumes"]
    place = volume.partition(":")[2]
    assert about["environment"]["HEADRACE_ENVIRONMENTS"].startswith(f"{place}/")
    assert compose()["networks"][SANDBOX] == {"internal": True}
    assert about["read_only"] is True
    assert about["tmpfs"]
    assert about["pids_limit"]
    assert about["mem_limit"]
    reach = {name for name, one in services().items() if SANDBOX in one.get("networks", ())}
    assert reach == {SANDBOX, PACKAGES, *CLIENTS}


def test_packages_come_through_a_proxy_that_holds_nothing_and_is_published_nowhere() -> None:
    about = services()[PACKAGES]
    assert set(about["environment"]) == {"HEADRACE_PACKAGE_INDEX", "HEADRACE_PACKAGE_HOSTS"}
    assert "ports" not in about
    assert "volumes" not in about
    listens = about["command"][-1].rpartition(":")[2]
    proxy = f"http://{PACKAGES}:{listens}"
    given = services()[SANDBOX]["environment"]
    assert (given["HTTPS_PROXY"], given["HTTP_PROXY"]) == (proxy, proxy)
    assert given["HEADRACE_PACKAGE_INDEX"] == about["environment"]["HEADRACE_PACKAGE_INDEX"]
    text = (ROOT / "deploy" / "kubernetes" / "packages.yaml").read_text()
    documents = {one["kind"]: one for one in yaml.safe_load_all(text)}
    (container,) = documents["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == about["command"]
    assert container["image"] == about["image"]


def test_exactly_the_processes_with_user_code_are_its_clients() -> None:
    assert names_of_processes_with_user_code() == CLIENTS
    port = service_port(services()[SANDBOX]["command"])
    for name, about in ours().items():
        url = about["environment"].get("HEADRACE_SANDBOX_URL")
        assert (url is not None) == (name in CLIENTS), name
        if url is not None:
            address = SandboxAddress.load({URL: url, **dict.fromkeys(VARIABLES, PEM)})
            assert address is not None
            assert (address.host, address.port) == (SANDBOX, port)


def service_port(command: list[str]) -> int:
    """The port on which this command of a service listens."""
    assert command[:4] == ["python", "-m", "infra.sandbox.service", "--listen"]
    return int(listen_address(command[4]).rpartition(":")[2])


def test_its_filter_is_docker_s_with_what_bubblewrap_needs_and_no_more() -> None:
    options = services()[SANDBOX]["security_opt"]
    assert options[0] == "no-new-privileges:true"
    (path,) = [one.partition(":")[2] for one in options if one.startswith("seccomp:")]
    profile = json.loads((ROOT / path).read_text())
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    allowed = {
        name
        for rule in profile["syscalls"]
        if rule["action"] == "SCMP_ACT_ALLOW" and "args" not in rule
        for name in rule["names"]
    }
    assert allowed >= OPENED
    never = "bpf keyctl add_key request_key kexec_load init_module finit_module reboot swapon setns"
    assert not allowed & {*never.split(), "userfaultfd", "perf_event_open", "io_uring_setup"}


def test_no_manifest_trusts_the_authors_of_user_code() -> None:
    for path in sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            pod = document.get("spec", {}).get("template", {}).get("spec", {})
            for container in pod.get("containers", ()):
                values = {one["name"]: one.get("value") for one in container.get("env", ())}
                assert values.get("HEADRACE_SANDBOX", "bwrap") in ("bwrap", "gvisor"), path.name


def test_on_kubernetes_it_is_restricted_by_bubblewrap_and_its_context() -> None:
    pod = manifests()["Deployment"]["spec"]["template"]["spec"]
    assert pod["hostUsers"] is False, "an unmasked /proc needs users of its own"
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert pod["securityContext"]["runAsNonRoot"] is True
    profile = pod["securityContext"]["seccompProfile"]
    assert profile["type"] == "Localhost"
    assert (ROOT / "deploy" / Path(profile["localhostProfile"]).name).exists()
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "procMount": "Unmasked",
        "capabilities": {"drop": ["ALL"]},
    }
    assert {one["name"] for one in container["env"]} == {
        "HEADRACE_SANDBOX",
        *VARIABLES,
        "HEADRACE_ENVIRONMENTS",
    }
    assert container["image"] == services()[SANDBOX]["image"]
    assert container["command"] == services()[SANDBOX]["command"]
    assert [set(volume) for volume in pod["volumes"]] == [{"name", "emptyDir"}] * 2


def test_on_kubernetes_only_workers_reach_it_and_it_reaches_nothing() -> None:
    deployment, policy = manifests()["Deployment"], manifests()["NetworkPolicy"]["spec"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"] == labels
    assert manifests()["Service"]["spec"]["selector"] == labels
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert policy["egress"] == []
    (rule,) = policy["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": {"headrace.dev/user-code": "yes"}}}]
    port = service_port(deployment["spec"]["template"]["spec"]["containers"][0]["command"])
    assert manifests()["Service"]["spec"]["ports"][0]["port"] == port
    text = (ROOT / "deploy" / "kubernetes" / "sandbox.yaml").read_text()
    name = manifests()["Service"]["metadata"]["name"]
    assert re.search(rf"HEADRACE_SANDBOX_URL=tcp://{name}:{port}$", text, re.M)


def test_it_refuses_to_start_without_a_certificate() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "infra.sandbox.service", "--listen", "tcp://127.0.0.1:0"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "HEADRACE_SANDBOX_TLS_CERT is not set" in done.stderr
