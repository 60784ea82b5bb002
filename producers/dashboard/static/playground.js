// Streams the answers of both models. Without this script the form is sent as a whole.
"use strict";

// Signs for control characters and for marks that change the direction of text, as on other pages.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f]/g;
const DIRECTIONS = /[\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069]/g;

function plain(text) {
  const mark = (one) => `\u2329U+${one.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}\u232a`;
  return text.replaceAll("\r\n", "\n").replace(UNSEEN, "\ufffd").replace(DIRECTIONS, mark);
}

// The texts of an answer in the form of OpenAI's server-sent events.
async function* textsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value.replaceAll("\r\n", "\n")).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (!data || data === "[DONE]") continue;
      const found = JSON.parse(data);
      if (found.error) throw new Error(found.error.message);
      const delta = found.choices && found.choices[0] && found.choices[0].delta;
      if (delta && delta.content) yield delta.content;
    }
  }
}

async function reasonOf(answer) {
  const isJson = (answer.headers.get("content-type") || "").includes("json");
  const found = isJson ? await answer.json() : {};
  if (found.error) return found.error.message;
  if (answer.status !== 401 && !isJson) {
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const reason = page.querySelector("[role=alert]");
    if (reason) return reason.textContent;
  }
  return answer.status === 401 ? "your session has ended; sign in again in another tab" : `status ${answer.status}`;
}

// Asks one model, and shows its answer in `place` as it arrives.
async function ask(form, side, place) {
  const fields = new URLSearchParams(new FormData(form));
  fields.set("side", side);
  let text = "";
  try {
    const answer = await fetch(form.dataset.playground, { method: "POST", body: fields });
    if (!answer.ok) throw new Error(await reasonOf(answer));
    for await (const more of textsOf(answer)) {
      text += more;
      place.textContent = plain(text);
    }
  } catch (error) {
    place.textContent = plain(`${text}${text ? "\n" : ""}No answer: ${error.message}`);
    place.classList.add("problem");
  }
  return text;
}

async function exchange(event) {
  const form = event.target, button = event.submitter;
  if (!form.dataset.playground || (button && button.value === "clear")) return;
  event.preventDefault();
  const question = form.elements.question, turns = form.elements.turns;
  if (!question.value.trim() || form.dataset.busy) return;
  form.dataset.busy = "yes";
  const state = document.getElementById("state");
  state.textContent = "Both models answer.";
  const shown = document.getElementById("exchange").content.firstElementChild.cloneNode(true);
  shown.querySelector(".question").textContent = plain(question.value);
  const sides = ["left", "right"], places = [...shown.querySelectorAll("article")];
  sides.forEach((side, n) => { places[n].querySelector("h2").textContent = form.elements[side].value; });
  document.getElementById("turns").append(shown);
  const texts = await Promise.all(sides.map((side, n) => ask(form, side, places[n].querySelector("pre"))));
  const known = JSON.parse(turns.value).concat({ question: question.value, left: texts[0], right: texts[1] });
  turns.value = JSON.stringify(known.slice(-50));
  question.value = "";
  question.focus();
  state.textContent = "Both models have answered.";
  delete form.dataset.busy;
}

document.addEventListener("submit", exchange);
