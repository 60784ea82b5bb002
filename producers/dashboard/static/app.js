// What moves on the pages: times in the browser's zone, curves, and parts that are read again.
"use strict";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function showTimes(root) {
  for (const time of root.querySelectorAll("time[datetime]:not([data-shown])")) {
    const at = new Date(time.dateTime);
    time.title = time.textContent;
    time.textContent = at.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
    time.dataset.shown = "yes";
  }
}

function askBefore(event) {
  const question = event.target.dataset.confirm;
  if (question && !window.confirm(question)) event.preventDefault();
}

function smooth(values, factor) {
  if (!factor) return values;
  let last = null;
  return values.map((value) => {
    if (value === null) return null;
    last = last === null ? value : factor * last + (1 - factor) * value;
    return last;
  });
}

class Curves {
  constructor(section) {
    this.section = section;
    this.charts = new Map();
    this.controls = section.querySelector(".controls");
    this.controls.hidden = false;
    this.controls.addEventListener("input", () => this.read());
    new ResizeObserver(() => this.resize()).observe(section);
    this.read();
    if (section.dataset.live === "yes") this.timer = setInterval(() => this.readWhileSeen(), 1000);
  }
  figures() { return [...this.section.querySelectorAll("figure[data-key]")]; }
  readWhileSeen() { if (!document.hidden) this.read(); }
  async read() {
    if (this.reading) return;
    this.reading = true;
    try {
      const range = this.controls.querySelector("[name=range]").value;
      const keys = this.figures().map((figure) => figure.dataset.key).join(",");
      const address = `${this.section.dataset.curves}?range=${range}&keys=${encodeURIComponent(keys)}`;
      const answer = await fetch(address, { headers: { Accept: "application/json" } });
      if (answer.ok && !answer.redirected) this.draw(await answer.json());
    } finally { this.reading = false; }
  }
  draw(found) {
    const factor = Number(this.controls.querySelector("[name=smoothing]").value);
    for (const figure of this.figures()) {
      const curve = found.curves[figure.dataset.key];
      if (!curve || curve.steps.length < 2) continue;
      const data = [curve.steps, smooth(curve.values, factor)];
      const last = curve.values[curve.values.length - 1];
      figure.querySelector("figcaption b").textContent = Number(last.toPrecision(4)).toString();
      const chart = this.charts.get(figure);
      if (chart) chart.setData(data);
      else this.charts.set(figure, this.make(figure, data));
    }
    if (this.timer && !["pending", "running"].includes(found.status)) clearInterval(this.timer);
  }
  make(figure, data) {
    const box = figure.querySelector(".chart");
    box.replaceChildren();
    const axis = { stroke: css("--dim"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") } };
    return new uPlot({
      width: box.clientWidth, height: 150, legend: { show: false }, cursor: { y: false },
      scales: { x: { time: false } }, axes: [{ ...axis, size: 28 }, { ...axis, size: 48 }],
      series: [{}, { stroke: css("--accent"), width: 1.5, points: { show: false } }],
    }, data, box);
  }
  resize() {
    for (const [figure, chart] of this.charts) chart.setSize({ width: figure.querySelector(".chart").clientWidth, height: 150 });
  }
}

async function readAgain() {
  if (document.hidden || !document.querySelector("[data-poll]")) return;
  const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
  if (!answer.ok || answer.redirected) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const old of document.querySelectorAll("[data-poll]")) {
    const fresh = page.getElementById(old.id);
    if (fresh && !old.contains(document.activeElement)) {
      showTimes(fresh);
      old.replaceChildren(...fresh.childNodes);
    }
  }
}

document.addEventListener("DOMContentLoaded", () => {
  showTimes(document);
  document.addEventListener("submit", askBefore);
  for (const section of document.querySelectorAll("[data-curves]")) new Curves(section);
  if (document.querySelector("[data-poll]")) setInterval(readAgain, 3000);
});
