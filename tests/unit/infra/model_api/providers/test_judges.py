"""What docs/rewards.md says about judges is what the client does."""

from pathlib import Path

from infra.model_api.providers.endpoints import PROVIDERS

PAGE = (Path(__file__).resolve().parents[5] / "docs" / "rewards.md").read_text()


def test_the_page_names_every_provider() -> None:
    assert [name for name in PROVIDERS if name not in PAGE] == []
