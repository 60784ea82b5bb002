"""The contract of `infra.ports.teachers.Teachers`; bound to a fake server and to real vLLM."""

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from infra.model_api.providers.client import ProviderClient
from infra.model_api.providers.teachers import VllmTeachers
from infra.ports.teachers import Teachers
from schemas.errors import Refused
from schemas.sampling import ProviderRef
from tests.kit.teacher import row_of

CLOSE = 1e-5
"""Between two answers about the same token, which a server may compute in other batches."""


@dataclass(frozen=True)
class Served:
    """A model on a server: what it is called, the texts of its tokens, and its number of positions."""

    base_url: str
    model: str
    texts: tuple[str, ...]
    context: int

    @property
    def ref(self) -> ProviderRef:
        return ProviderRef(name=self.model, model=self.model, base_url=self.base_url)


class TeachersSuite:
    """Bind with a fixture `served`."""

    @pytest.fixture
    def served(self) -> Served:
        raise NotImplementedError

    @pytest.fixture
    async def teachers(self) -> AsyncIterator[Teachers]:
        client = ProviderClient(None, first_pause_s=0.01)
        yield VllmTeachers(client, patience_s=60)
        await client.aclose()

    async def test_each_chosen_token_gets_its_logprob_and_each_token_its_text(
        self, served: Served, teachers: Teachers
    ) -> None:
        row = row_of((9, 12, 15, 18, 21, 12), prompt=3)
        found = await teachers.read(served.ref, row, key=None, what="a row")
        assert found.logprobs[:3] == (0.0, 0.0, 0.0)
        assert all(math.isfinite(p) and p < 0 for p in found.logprobs[3:])
        assert found.texts == {token: served.texts[token] for token in (12, 15, 18, 21)}

    async def test_the_probabilities_of_all_tokens_in_one_place_add_up_to_one(
        self, served: Served, teachers: Teachers
    ) -> None:
        rows = [row_of((9, 12, 15, token), prompt=3) for token in range(len(served.texts))]
        found = await asyncio.gather(
            *(teachers.read(served.ref, row, key=None, what="a row") for row in rows)
        )
        total = math.fsum(math.exp(one.logprobs[3]) for one in found)
        assert total == pytest.approx(1.0, abs=1e-4)

    async def test_a_token_has_the_same_logprob_whatever_follows_and_whenever_it_is_asked(
        self, served: Served, teachers: Teachers
    ) -> None:
        long = row_of((9, 12, 15, 18, 21, 12, 11, 10), prompt=2)
        short = row_of(long.tokens[:5], prompt=2)
        whole, again, part = await asyncio.gather(
            *(teachers.read(served.ref, row, key=None, what="a row") for row in (long, long, short))
        )
        assert again.logprobs == pytest.approx(whole.logprobs, abs=CLOSE)
        assert part.logprobs == pytest.approx(whole.logprobs[:5], abs=CLOSE)

    async def test_a_row_that_is_too_long_is_refused_by_its_name(
        self, served: Served, teachers: Teachers
    ) -> None:
        row = row_of((12,) * (served.context + 1), prompt=2)
        with pytest.raises(Refused, match=r"about row 7:.* maximum context length.*; check the"):
            await teachers.read(served.ref, row, key=None, what="row 7")

    async def test_a_token_that_the_model_lacks_is_refused(
        self, served: Served, teachers: Teachers
    ) -> None:
        row = row_of((9, 12, 1_000_000), prompt=2)
        with pytest.raises(Refused, match="out of vocabulary"):
            await teachers.read(served.ref, row, key=None, what="a row")

    async def test_a_model_that_is_not_served_is_refused(
        self, served: Served, teachers: Teachers
    ) -> None:
        other = served.ref.model_copy(update={"model": "nobody/none"})
        with pytest.raises(Refused, match=r"does not exist.*; check the name of the model"):
            await teachers.read(other, row_of((9, 12, 15), prompt=2), key=None, what="a row")
