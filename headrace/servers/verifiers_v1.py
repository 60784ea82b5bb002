"""Environments of `verifiers.v1` (0.4): tasksets, harnesses, judges and whole environments.

Everything runs on this machine. A harness that runs as a script gets the packages of the rollout's
environment, because a sandbox has no network to install others from.
"""

import contextlib
import hashlib
import json
import sys
import types
from importlib import import_module
from pathlib import Path
from typing import Any

from headrace.servers.attempts import Json
from headrace.servers.serving import RolloutFailed, task_of
from headrace.servers.session_router import SessionRouter

SESSION_HEADER = "X-Session-ID"
LOCAL = {"type": "subprocess"}
CHAT_LOOP = {"id": "null"}
"""The harness of a role that neither the settings nor the taskset give one: a chat with the task's
tools."""


CAPACITY = 8
"""How many rollouts are made at the same time, unless `max_concurrent` says it. A harness is a process
of its own for each rollout, and so are the tools of a task."""


class TasksetEnvironment:
    """The environment of an entry point that exports a Taskset (and perhaps a Harness or an Env), or
    that defines `load_environment()`. `settings` are those of `EnvConfig`."""

    def __init__(self, module: types.ModuleType, settings: Json) -> None:
        subprocess = import_module("verifiers.v1.runtimes.subprocess")
        subprocess.SubprocessRuntime.prepare_uv_script = _prepare_script
        self._vf = import_module("verifiers.v1")
        self._router = SessionRouter(SESSION_HEADER)
        self._held = contextlib.AsyncExitStack()
        self._url = ""
        self.capacity: int | None = int(settings.pop("max_concurrent", CAPACITY))
        if hasattr(module, "load_environment"):
            self._env: Any = module.load_environment()
        else:
            self._env = _load(module, settings)

    async def start(self) -> None:
        self._url = await self._router.start()
        await self._held.enter_async_context(self._env.serving())

    async def make(self, request: Json) -> float:
        vf, sessions = self._vf, list[str]()

        def follow(trace: Any) -> None:
            sessions.append(trace.id)
            self._router.route(
                trace.id, url=request["chat_completions_url"], key=request["llm_api_key"]
            )

        client = vf.EvalClientConfig(base_url=self._url, api_key_var="HEADRACE_NO_KEY")
        context = vf.ModelContext(model="policy", client=client)
        try:
            episode = await self._env.run_episode(self._task(request), context, on_trace=follow)
        finally:
            for session in sessions:
                self._router.forget(session)
        return _reward(episode)

    def rows(self, most: int | None) -> list[Json]:
        rows = []
        for task in self._env.taskset:
            data = task.data.model_dump(mode="json", exclude_defaults=True)
            prompt = task.data.prompt_text or task.data.name or "(the task has no prompt)"
            rows.append({"user_prompt": prompt, "metadata": {"task": json.dumps(data)}})
            if len(rows) == most:
                break
        return rows

    def _task(self, request: Json) -> Any:
        """Build the task of a request as the taskset itself would. Its data is not loaded again."""
        found = task_of(request)
        if type(found) is int:
            (task,) = self._env.taskset.include(idx=[found])
            return task
        if not isinstance(found, dict):
            raise RolloutFailed(
                "the row has no metadata.task; make the dataset with `python -m headrace.verifiers`"
            )
        task_class = type(self._env.taskset).task_type()
        concrete_type = import_module("verifiers.v1.utils.generic").concrete_type
        data_class = concrete_type(task_class, self._vf.TaskData) or self._vf.TaskData
        return task_class(data_class.model_validate(found), self._env.config.taskset.task)


def _load(module: types.ModuleType, settings: Json) -> Any:
    """Return the environment of a module's taskset, or of the taskset that the settings name."""
    vf, loaders = import_module("verifiers.v1"), import_module("verifiers.v1.utils.loaders")
    name = settings.get("taskset", {}).get("id") or module.__name__
    if name == module.__name__ and not hasattr(module, "__all__"):
        bases = (vf.Taskset, vf.Harness, vf.Env)
        module.__dict__["__all__"] = [
            each
            for each, value in vars(module).items()
            if isinstance(value, type)
            and issubclass(value, bases)
            and value.__module__ == module.__name__
        ]
    roles = loaders.env_config_type(name, settings.get("id", ""))
    filled = {**settings, "taskset": {**settings.get("taskset", {}), "id": name}}
    has_harness = loaders.default_harness_id(name) == name
    for role, field in roles.model_fields.items():
        if isinstance(field.default, vf.AgentConfig):
            own = dict(settings.get(role, {}))
            own.setdefault("runtime", LOCAL)
            if not has_harness:
                own.setdefault("harness", CHAT_LOOP)
            filled[role] = own
    return loaders.load_environment(loaders.resolve_env_config(filled))


def _reward(episode: Any) -> float:
    """Return the reward of an episode: that of its agent, or the mean of those that are trained. Raises
    RolloutFailed when a part of it failed."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok or not episode.traces:
        what = f"{errors[-1].type}: {errors[-1].message}" if errors else "it has no trace"
        raise RolloutFailed(f"the episode failed: {what}")
    trained = [trace for trace in episode.traces if trace.agent.trainable] or episode.traces
    return float(sum(trace.reward for trace in trained) / len(trained))


async def _prepare_script(
    runtime: Any, script: str | bytes, env: object = None, *, activate: bool = True
) -> list[str]:
    """Write a script to a file, and return the command that runs it with the packages that are there."""
    data = script.encode() if isinstance(script, str) else script
    path = Path(runtime.scripts_dir) / f"{hashlib.sha256(data).hexdigest()}.py"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return [sys.executable, str(path)]
