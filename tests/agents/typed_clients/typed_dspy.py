"""The package `dspy` with a typed signature and its JSON adapter, which sends a schema to models that
LiteLLM lists as able to follow one."""

import json

import dspy


class Judge(dspy.Signature):
    """Judge."""

    question: str = dspy.InputField()
    sure: bool = dspy.OutputField()
    number: int = dspy.OutputField()


async def run(base_url: str, api_key: str, prompt: str) -> str:
    model = dspy.LM("openai/gpt-4o-mini", api_base=base_url, api_key=api_key, cache=False)
    with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
        found = await dspy.Predict(Judge).acall(question=prompt)
    assert isinstance(found.sure, bool)
    assert isinstance(found.number, int)
    return json.dumps({"sure": found.sure, "number": found.number})
