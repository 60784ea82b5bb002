"""What is found in an entry point reaches the client as it is."""

from infra.sandbox.service.messages import FoundRollout, encode_found, parse_found
from schemas.specs import DiscoveredRollout, Entrypoint


def test_every_field_of_a_discovered_rollout_travels() -> None:
    found = DiscoveredRollout(
        entrypoint=Entrypoint(rollout="say"),
        workflow="Do",
        grader="Check",
        rewards=("exact",),
        tools=("add", "multiply"),
        mcp=("search",),
        mcp_addresses=("search.example.com:443",),
    )
    ours = {"environment"}  # the client knows it, and does not take it from a service
    assert set(FoundRollout.model_fields) == set(DiscoveredRollout.model_fields) - ours
    assert parse_found(encode_found((found,))) == (found,)
