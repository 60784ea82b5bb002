"""A secret value shows its text by one method only."""

import copy
import dataclasses
import json
import pickle

import pytest

from schemas.secrets.secret_value import SecretValue

VALUE = SecretValue("hush-hush")


@dataclasses.dataclass
class Holder:
    values: dict[str, SecretValue]


@pytest.mark.parametrize(
    "shown",
    [
        repr(VALUE),
        str(VALUE),
        f"{VALUE}",
        f"{VALUE:>20}",
        "%s" % VALUE,  # noqa: UP031 - it is what loggers do
        repr({"a": VALUE}),
        repr(Holder({"a": VALUE})),
        str(dataclasses.asdict(Holder({"a": VALUE}))),
    ],
)
def test_no_text_of_it_holds_the_value(shown: str) -> None:
    assert "hush" not in shown
    assert "***" in shown


def test_it_cannot_be_pickled_or_written_as_json() -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(VALUE, protocol)
    with pytest.raises(TypeError):
        json.dumps({"a": VALUE})


def test_it_is_equal_to_the_same_value_and_a_copy_is_itself() -> None:
    assert SecretValue("hush-hush") == VALUE
    assert SecretValue("hush") != VALUE
    assert VALUE != "hush-hush"
    assert hash(VALUE) == hash(SecretValue("hush-hush"))
    assert copy.copy(VALUE) is copy.deepcopy(VALUE) is VALUE
    assert VALUE.reveal() == "hush-hush"
