"""The package `langchain-openai` with `with_structured_output`."""

from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Verdict(BaseModel):
    sure: bool
    number: int


async def run(base_url: str, api_key: str, prompt: str) -> str:
    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key)
    found = await model.with_structured_output(Verdict).ainvoke(prompt)
    return Verdict.model_validate(found).model_dump_json()
