"""Property tests try the same examples in every `make test`, and random ones when they are asked for."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.kit.property_examples import USUAL, examples, factor, profile


def drawn(chosen: settings) -> list[int]:
    """The numbers that a property is tried on."""
    numbers: list[int] = []

    @settings(chosen, phases=[Phase.generate])
    @given(st.integers())
    def law(number: int) -> None:
        numbers.append(number)

    law()
    return numbers


def test_without_the_variable_the_examples_are_always_the_same() -> None:
    assert drawn(profile(0)) == drawn(profile(0))


def test_with_the_variable_the_examples_are_random_and_more() -> None:
    random = profile(2)
    assert random.max_examples == 2 * USUAL
    assert random.print_blob, "a failure says how to repeat it"
    assert drawn(random) != drawn(random)


def test_a_test_with_fewer_examples_grows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_EXAMPLES", raising=False)
    assert examples(5).max_examples == 5
    monkeypatch.setenv("HEADRACE_EXAMPLES", "20")
    assert examples(5).max_examples == 100


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5"])
def test_a_bad_number_is_refused(text: str) -> None:
    with pytest.raises(SystemExit, match="HEADRACE_EXAMPLES must be a positive number"):
        factor(text)
