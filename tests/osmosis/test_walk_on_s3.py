"""The same walk where the blobs of the platform are in a bucket that clients reach, so that datasets go
straight to it and come straight from it."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.kit.s3 import fresh_bucket
from tests.osmosis.team import Team
from tests.osmosis.test_datasets import (
    data,
    test_a_dataset_of_100_mb_goes_up_in_parts_and_down,
    test_a_name_is_overwritten_when_that_is_wanted,
    test_a_small_dataset_goes_up_and_down,
)
from tests.osmosis.test_walk import (
    model,
    pytestmark,
    test_a_deployed_model_answers,
    test_a_deployed_model_is_evaluated_stopped_and_repeated,
    test_a_run_is_followed_to_its_end,
    trained,
)
from tests.stack.s3 import S3Server

__all__ = [
    "data",
    "model",
    "pytestmark",  # pytest.mark.osmosis, among others
    "test_a_dataset_of_100_mb_goes_up_in_parts_and_down",
    "test_a_deployed_model_answers",
    "test_a_deployed_model_is_evaluated_stopped_and_repeated",
    "test_a_name_is_overwritten_when_that_is_wanted",
    "test_a_run_is_followed_to_its_end",
    "test_a_small_dataset_goes_up_and_down",
    "trained",
]


@pytest.fixture(scope="module")
def settings(s3: S3Server, s3_client: Any) -> Iterator[Mapping[str, str]]:
    with fresh_bucket(s3, s3_client) as bucket:
        yield {
            "HEADRACE_BLOBS": f"s3://{bucket.name}/p",
            "HEADRACE_S3_PUBLIC_ENDPOINT": s3.endpoint,
            **s3.environment,
        }


def test_data_goes_straight_to_the_store(team: Team, s3: S3Server) -> None:
    with team.api("member") as api:
        body = {"name": "straight", "file_name": "r.jsonl", "file_size": 100}
        begun = api.post("/datasets", json=body).json()
        assert begun["upload"]["parts"][0]["url"].startswith(s3.endpoint)
