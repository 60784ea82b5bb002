"""The pages of regrades, and both rewards of a sample in the reader."""

import pytest

from tests.kit.application import Application
from tests.kit.showcase import FIRST, SECOND, fill
from tests.kit.showcase_regrade import REGRADE
from tests.kit.signed_in import signed_in

pytestmark = pytest.mark.postgres


async def test_a_report_leads_to_its_disagreements_in_the_reader(app: Application) -> None:
    await fill(app, steps=2)
    async with signed_in(app) as browser:
        listed = (await browser.get(f"/runs/{FIRST}/regrades")).text
        assert f"/regrades/{REGRADE}" in listed
        assert "stricter-g" in listed
        report = (await browser.get(f"/runs/{FIRST}/regrades/{REGRADE}")).text
        assert "0.73" in report
        assert "KeyError" in report
        assert f"samples?step=2&amp;slot=0&amp;regrade={REGRADE}#sample-1" in report
        reader = f"/runs/{FIRST}/samples?step=2&slot=0"
        both = (await browser.get(f"{reader}&regrade={REGRADE}")).text
        assert ", graded again 0.25</h3>" in both
        assert "Graded again: grader_error" in both
        assert "graded again" not in (await browser.get(reader)).text
        found = await browser.get(f"/runs/{FIRST}/regrades/{REGRADE}/report.json")
        assert found.json()["regrade"]["report"]["lost"] == 1


async def test_a_regrade_of_another_run_is_not_found(app: Application) -> None:
    await fill(app, steps=2)
    async with signed_in(app) as browser:
        for path in (f"regrades/{REGRADE}", f"samples?step=1&regrade={REGRADE}"):
            assert (await browser.get(f"/runs/{SECOND}/{path}")).status_code == 404, path
        empty = await browser.get(f"/runs/{SECOND}/regrades")
        assert "No sample was graded again" in empty.text
