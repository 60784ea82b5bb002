"""A chat template comes with a model, so it is treated as hostile: its time, memory and output are
bounded."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.errors import Refused, UserCodeError
from schemas.sampling import Message, ModelRef
from tests.kit.tokenizers import TEMPLATES
from tests.unit.trainer.support import TINY
from trainer.model import chat_template, template_process
from trainer.model.base import build_base
from trainer.model.char_tokenizer import CHAT_TEMPLATE
from trainer.model.chat_template import Chat
from trainer.model.template_process import TemplateProcess, shared_process

TALK = (
    Message(role="user", content="1+1?"),
    Message(role="assistant", content="2 \ud800 é好"),
    Message(role="user", content="sure?"),
)
FOR_EVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set n = namespace(x='aaaaaaaa') %}"
    "{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x | length }}"
)
HOSTILE = {
    "nested loops": (FOR_EVER, "did not end within"),
    "multiplication": ("{{ ('a' * 10000000000) | length }}", "of memory"),
    "doubling": (DOUBLING, "of memory"),
    "padding": ("{{ '%9999999999d' % 1 }}", "of memory|rejects"),
    "output": ("{% for a in range(90000) %}{{ 'a' * 300 }}{% endfor %}", "characters"),
    "recursion": ("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", "rejects|end"),
}


@pytest.fixture
def chat() -> Chat:
    base = build_base(TINY, {}, device=torch.device("cpu"))
    return Chat(base.tokenizer, base.stop_ids)


@pytest.fixture(autouse=True)
def _short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time limit to one that a test can wait for."""
    monkeypatch.setattr(template_process, "DEADLINE_S", 2.0)


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_hostile_template_is_refused_and_the_next_is_rendered(
    chat: Chat, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, says = HOSTILE[name]
    if says == "of memory":  # on a busy machine the time would be up first
        monkeypatch.setattr(template_process, "DEADLINE_S", 60.0)
    chat._tokenizer.chat_template = template
    with pytest.raises(UserCodeError, match=says):
        chat.text(TALK, reply_next=True)
    chat._tokenizer.chat_template = "{{ messages[0].content }}"
    assert chat.text(TALK, reply_next=True) == "1+1?"


def _saved(directory: Path, template: str) -> ModelRef:
    base = build_base(TINY, {}, device=torch.device("cpu"))
    base.model.save_pretrained(directory)
    base.tokenizer.chat_template = template
    base.tokenizer.save_pretrained(directory)
    return ModelRef(kind="directory", name=str(directory))


def test_a_model_with_a_hostile_template_is_not_loaded(tmp_path: Path) -> None:
    ref = _saved(tmp_path, FOR_EVER)
    with pytest.raises(Refused, match="cannot be used: the model's chat template did not end"):
        build_base(ref, {}, device=torch.device("cpu"))


def test_a_template_that_rejects_a_plain_message_is_loaded(tmp_path: Path) -> None:
    ref = _saved(tmp_path, "{{ raise_exception('begin with a system message') }}")
    assert build_base(ref, {}, device=torch.device("cpu")).num_bytes > 0


def test_twin_in_this_process_the_same_template_goes_on(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template runs in a thread, with a shorter loop than FOR_EVER, so that the thread ends."""
    shorter = FOR_EVER.replace("99999", "2500")
    monkeypatch.setattr(chat_template, "CHAT_TEMPLATE", shorter)
    monkeypatch.setattr(chat_template, "OUR_TEMPLATES", {shorter})
    monkeypatch.setattr(
        shared_process, "render", lambda *_, **__: pytest.fail("it is rendered here")
    )
    chat._tokenizer.chat_template = shorter
    turned = threading.Event()

    def render() -> None:
        chat.text(TALK, reply_next=True)
        turned.set()

    here = threading.Thread(target=render)
    here.start()
    here.join()
    assert turned.is_set(), "nothing bounded its 6 million turns"


@pytest.mark.parametrize("template", [*TEMPLATES.values(), CHAT_TEMPLATE])
@pytest.mark.parametrize("reply_next", [False, True])
def test_a_template_writes_there_what_it_writes_here(
    chat: Chat, template: str, reply_next: bool
) -> None:
    chat._tokenizer.chat_template = template
    plain = [{"role": m.role, "content": m.content} for m in TALK]
    here = chat._tokenizer.apply_chat_template(
        plain, tokenize=False, add_generation_prompt=reply_next
    )
    names = {name: str(value) for name, value in chat._tokenizer.special_tokens_map.items()}
    assert shared_process.render(template, plain, reply_next=reply_next, names=names) == here
    assert chat.text(TALK, reply_next=reply_next) == here


def test_a_process_that_somebody_kills_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is killed between two texts, and in the middle of one."""
    monkeypatch.setattr(template_process, "DEADLINE_S", 60.0)
    process = TemplateProcess()
    slow = "{% for a in range(3000) %}{% for b in range(1000) %}{% endfor %}{% endfor %}done"
    said: list[str] = []
    try:
        assert process.render("{{ 1 }}", [], reply_next=False, names={}) == "1"
        assert process._process is not None
        os.kill(process._process.pid, signal.SIGKILL)
        assert process.render("{{ 2 }}", [], reply_next=False, names={}) == "2"
        rendering = process._process
        asking = threading.Thread(
            target=lambda: said.append(process.render(slow, [], reply_next=False, names={}))
        )
        asking.start()
        os.kill(rendering.pid, signal.SIGKILL)
        asking.join()
    finally:
        process.close()
    assert said == ["done"]


def test_one_that_ends_whenever_it_is_asked_is_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "TRIES", 1)
    process = TemplateProcess()
    original = process._ask

    def killed(running: object, request: object) -> dict[str, Any]:
        assert process._process is not None
        process._process.kill()
        process._process.wait()
        return original(running, request)  # type: ignore[arg-type]  # as it was given

    monkeypatch.setattr(process, "_ask", killed)
    with pytest.raises(UserCodeError, match="ended its process 3 times"):
        process.render("{{ 1 }}", [], reply_next=False, names={})
    process.close()
