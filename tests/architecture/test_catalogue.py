"""Registry, catalogue, code and pages agree."""

import ast
import importlib
import re
from typing import Any

from consumers.registry import CONTROL_CONSUMERS, REGISTRY, load
from schemas.events import ALL_EVENTS, Event
from tests.kit.source import ROOT, modules, nodes, parse

MODULES = [*REGISTRY.values(), "consumers.project.consumer"]

TEMPLATE = re.compile(
    r"\A\S[^\n]*\.\n"
    r"Reads: .+?\.\s+Emits: .+?\.\s+Stream: .+?\.\n"
    r"Does: .+?\.\s+Waits for: .+?\.\n"
    r"Safe to repeat because: .+?\.",
    re.DOTALL,
)

EDGE_EVENTS = {
    "CommitRequested",
    "DatasetRegistered",
    "RunRequested",
    "EvaluationRequested",
    "EvaluationStopRequested",
    "EvaluationRetryRequested",
    "EvaluationImported",
    "EvaluationRowsImported",
    "RunPauseRequested",
    "RunResumeRequested",
    "RunStopRequested",
    "MessageRedriven",
    "VerificationRequested",
    "RegradeRequested",
    "ModelUndeployRequested",
    "HubUploadRequested",
    "HubUploadCancelRequested",
    "DatasetDeleted",
    "ArtifactPublished",
    "ArtifactWithdrawn",
    "RunRenamed",
    "RunArchived",
    "RunRestored",
    "RunDeleted",
    "RunApproved",
    "WorkspaceConnected",
    "WorkspaceDisconnected",
    "PushReceived",
    "HookPinged",
    "RefsCheckRequested",
}
"""Commands and facts from outside, which the edges append."""

RUNTIME_EVENTS = {"MessageDeadLettered"}


def test_every_consumer_says_what_it_does_in_the_same_form() -> None:
    texts = {module: importlib.import_module(module).__doc__ or "" for module in MODULES}
    assert {module: text for module, text in texts.items() if not TEMPLATE.match(text)} == {}


def test_a_docstring_names_what_the_consumer_reads_and_emits() -> None:
    for name, module in REGISTRY.items():
        consumer = load(name)
        said = re.sub(r"\s+", " ", importlib.import_module(module).__doc__ or "")
        reads = re.search(r"Reads: (.+?)\. ", said)
        emits = re.search(r"Emits: (.+?)\. ", said)
        assert reads is not None, name
        assert emits is not None, name
        assert set(reads.group(1).split(", ")) == {event.__name__ for event in consumer.reads}, name
        assert set(emits.group(1).split(", ")) == {event.__name__ for event in consumer.emits}, name


def test_every_consumer_is_in_the_registry() -> None:
    found = set()
    for path in modules("consumers"):
        tree = parse(path)
        targets = {
            t.id
            for node in tree.body
            if isinstance(node, ast.Assign)
            for t in node.targets
            if isinstance(t, ast.Name)
        } | {
            node.target.id
            for node in tree.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        if "CONSUMER" in targets:
            found.add(".".join(path.relative_to(ROOT).with_suffix("").parts))
    assert found == set(REGISTRY.values())


def test_every_consumer_is_in_the_documentation() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    paths = [module.replace(".", "/") + ".py" for module in MODULES]
    assert [path for path in paths if f"`{path}`" not in page] == []


def test_the_supervisor_and_the_control_process_run_every_consumer() -> None:
    from infra.operations.local.supervisor import DEVICE_CONSUMERS, HOSTED, SERVING

    assert {*DEVICE_CONSUMERS, *CONTROL_CONSUMERS, *SERVING} == set(REGISTRY)
    for workers in HOSTED.values():
        hosted = [name for names in workers.values() for name in names]
        assert sorted(hosted) == sorted(DEVICE_CONSUMERS), "each has one process"


def constructed(*roots: str) -> set[str]:
    """The names `X` of calls `X(...)` and `X.model_validate(...)` anywhere under these roots."""
    names: set[str] = set()
    for path in modules(*roots):
        for node in nodes(path):
            if not isinstance(node, ast.Call):
                continue
            made = node.func.value if isinstance(node.func, ast.Attribute) else node.func
            if isinstance(made, ast.Name):
                names.add(made.id)
    return names


def test_every_event_has_an_emitter() -> None:
    emitted = {event.__name__ for name in REGISTRY for event in load(name).emits}
    declared = emitted | EDGE_EVENTS | RUNTIME_EVENTS
    assert {event.__name__ for event in ALL_EVENTS} == declared
    by_consumers = constructed("consumers")
    assert emitted <= by_consumers, emitted - by_consumers
    assert constructed("infra") >= RUNTIME_EVENTS
    assert constructed("producers") | {"EvaluationRequested"} >= EDGE_EVENTS


def test_the_catalogue_lists_every_event_once() -> None:
    def leaves(kind: type[Any]) -> set[type[Any]]:
        inner = [k for k in kind.__subclasses__() if k.__module__.startswith("schemas.events.")]
        return set().union(*map(leaves, inner)) if inner else {kind}

    public = {kind for kind in leaves(Event) if hasattr(kind, "type")}
    assert public == set(ALL_EVENTS)
    assert len({event.type for event in ALL_EVENTS}) == len(ALL_EVENTS)
