"""Teachers over a fake server keep the contract."""

from collections.abc import AsyncIterator

import pytest

from tests.contracts.teachers_suite import Served, TeachersSuite
from tests.kit.provider import provider
from tests.kit.teacher import MODEL, FakeTeacher


class TestFake(TeachersSuite):
    @pytest.fixture
    async def served(self) -> AsyncIterator[Served]:
        fake = FakeTeacher()
        async with provider(fake) as listening:
            yield Served(listening.base_url, MODEL, fake.texts, fake.context)
