"""`python -m producers.tryout`: tries a rollout without a server, evaluates it, or checks it.

The request is read from standard input (`producers/tryout/request.py`). The answers are lines of JSON on
standard output: `{"sample": {...}}` for each sample as soon as it is graded, `{"report": {...}}` with
the figures of an evaluation at its end, `{"note": "..."}` for what happens meanwhile, and
`{"failure": {...}}` if the rollout cannot be tried. This is a composition root.
"""

import asyncio
import json
import os
import signal
import sys

from pydantic import ValidationError

from consumers.process.tryout import Tryout, open_tryout, rollout_ref
from infra.settings.settings import BadSetting, Settings
from producers.tryout import plan
from producers.tryout.checks import check_rollout
from producers.tryout.evaluation import evaluate
from producers.tryout.report import sample_documents
from producers.tryout.request import TryoutRequest
from producers.tryout.working_tree import snapshot_of
from schemas.config import EvalConfig, RunConfig
from schemas.errors import HeadraceError, Refused
from schemas.sampling import PolicyRef
from schemas.specs import DatasetRef, GroupTemplate

PREPARING = "installing packages and importing the code in a sandbox"


def say(**document: object) -> None:
    """Print one line of JSON."""
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


async def try_rollout(request: TryoutRequest, settings: Settings) -> None:
    """Try the rows of a request, and print each sample. Raises Refused when that is impossible."""
    config = plan.parse_config(request)
    file = await asyncio.to_thread(plan.read_dataset, plan.dataset_path(request, config))
    plan.check_rows(file)
    if request.first >= len(file.rows):
        raise Refused(
            f"row {request.first} is behind the last row of {file.path.name}, which is "
            f"{len(file.rows) - 1}; give a smaller --first"
        )
    secrets = await plan.secrets_of(config)
    snapshot = await asyncio.to_thread(snapshot_of, request.workspace)
    needs_engine = plan.needs_engine(request, config)
    if request.mode == "evaluate":
        plan.check_evaluation(config)
    if needs_engine:
        for warning in plan.character_warnings(config.experiment.model_path, file):
            say(note=f"warning: {warning}")
        say(note=f"loading {config.experiment.model_path}")
    async with open_tryout(
        settings,
        with_engine=needs_engine,
        find_key=plan.find_key,
        secrets=secrets,
    ) as tryout:
        say(note=PREPARING)
        template = await _template(tryout, request, config, snapshot)
        if template.rollout is not None:
            await plan.add_judge_keys(secrets, template.rollout)
        tryout.use_rows(file.rows)
        if isinstance(config, EvalConfig) and request.mode == "evaluate":
            await evaluate(tryout, template, config, file.rows, say=say)
            return
        last = min(request.first + request.rows, len(file.rows))
        for row in range(request.first, last):
            tried = await tryout.try_row(row, template)
            for document in sample_documents(tried, file.rows[row]):
                say(sample=document)


async def _template(
    tryout: Tryout, request: TryoutRequest, config: plan.Config, snapshot: bytes
) -> GroupTemplate:
    """The template of the groups. Raises Refused when the rollout or the model cannot be used."""
    entrypoint = plan.entrypoint_of(request, config)
    model = await plan.resolve_model(request, config, tryout=tryout)
    stored = await tryout.store(snapshot)
    found = await tryout.discover(snapshot, [entrypoint])
    tuned = config.advanced if isinstance(config, RunConfig) else None
    return GroupTemplate(
        dataset=DatasetRef(dataset="tryout", name="tryout", content=stored, num_rows=1),
        model=model,
        policy=PolicyRef(version=0),
        tuning=tuned.tuning if tuned else "lora",
        lora_alpha=tuned.lora_alpha if tuned else 32.0,
        lora_scaling=tuned.lora_scaling if tuned else None,
        params=plan.sampling_params(config),
        num_samples=_num_attempts(request, config),
        rollout=rollout_ref(config, entrypoint, found, stored),
        run="tryout",
    )


def _num_attempts(request: TryoutRequest, config: plan.Config) -> int:
    if isinstance(config, EvalConfig) and request.mode == "evaluate":
        return config.evaluation.n
    return request.attempts


async def validate(request: TryoutRequest, settings: Settings) -> None:
    """Print the result of every check of a rollout, as soon as it is known. Nothing is sampled."""
    say(note=PREPARING)
    async with open_tryout(
        settings, with_engine=False, find_key=plan.find_key, secrets=plan.no_secrets()
    ) as tryout:
        async for check in check_rollout(request, tryout):
            say(checks=[check.document()])


def main() -> int:
    """Answer one request. Exit codes: 0 answered, 1 refused."""
    try:
        request = TryoutRequest.model_validate_json(sys.stdin.read())
        settings = Settings.load(os.environ)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        act = validate if request.mode == "validate" else try_rollout
        asyncio.run(act(request, settings))
    except Refused as error:
        issues = [{"key": i.key, "message": i.message} for i in error.issues]
        say(failure={"code": error.code, "message": error.message, "issues": issues})
        return 1
    except (HeadraceError, BadSetting, ValidationError) as error:
        say(failure={"code": "FAILED", "message": str(error), "issues": []})
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
