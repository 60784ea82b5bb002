"""Environments of the 0.1 line of `verifiers`: those that `load_environment()` returns."""

import contextlib
import json
import os
import types
import uuid
from importlib import import_module
from typing import Any

from headrace.servers.attempts import Json
from headrace.servers.serving import RolloutFailed, task_of

RETRIES = 2


class OlderEnvironment:
    """The environment that `load_environment()` of an entry point returns, or that the settings name by
    `id`. It gets the table `args` of the settings."""

    def __init__(self, module: types.ModuleType, settings: Json) -> None:
        self._resolve = import_module("verifiers.clients").resolve_client
        self._config = import_module("verifiers.types").ClientConfig
        self.capacity: int | None = settings.get("max_concurrent")
        args = settings.get("args", {})
        load = getattr(module, "load_environment", None)
        if load is not None:
            self._env: Any = load(**args)
        elif "id" in settings:
            self._env = import_module("verifiers").load_environment(settings["id"], **args)
        else:
            raise RolloutFailed(
                "the entry point defines no load_environment; define it, or set `id` in "
                "[tool.headrace.environment]"
            )

    async def start(self) -> None:
        """Do nothing: such an environment shares nothing."""

    async def make(self, request: Json) -> float:
        # The library takes keys from variables only. The name keeps it from child processes.
        variable = f"HEADRACE_API_KEY_{uuid.uuid4().hex}"
        os.environ[variable] = request["llm_api_key"]
        try:
            client = self._resolve(
                self._config(
                    api_base_url=request["chat_completions_url"],
                    api_key_var=variable,
                    max_retries=RETRIES,
                )
            )
        finally:
            del os.environ[variable]
        try:
            output = await self._env.run_rollout(self._input(request), client, "policy", {})
        finally:
            with contextlib.suppress(Exception):  # the reward stays, however its client ends
                await client.close()
        if output.get("error"):
            raise RolloutFailed(f"the environment failed: {output['error']}")
        return float(output["reward"])

    def rows(self, most: int | None) -> list[Json]:
        rows = []
        for example in self._env.get_dataset(n=-1 if most is None else most):
            prompt = example["prompt"]
            said = prompt if isinstance(prompt, str) else prompt[-1]["content"]
            data = json.dumps(dict(example), default=str)
            rows.append({"user_prompt": str(said), "metadata": {"task": data}})
        return rows

    def _input(self, request: Json) -> Json:
        task = task_of(request)
        if type(task) is int:
            return dict(self._env.get_dataset()[task])
        if isinstance(task, dict):
            return task
        return {
            "example_id": 0,
            "prompt": request["initial_messages"],
            "answer": request.get("label") or "",
            "info": request.get("metadata") or {},
        }
