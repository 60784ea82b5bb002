// What moves on the pages: times in the browser's zone, curves, and parts that are read again.
"use strict";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function showTimes(root) {
  for (const time of root.querySelectorAll("time[datetime]:not([data-shown])")) {
    const at = new Date(time.dateTime);
    time.title = time.textContent;
    // In the form of the text that it replaces, so that nothing beside it moves. Swedes write it so.
    time.textContent = at.toLocaleString("sv-SE");
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

// One key follows a link that names it, and j and k walk through the answers of a group.
function walk(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
  const link = [...document.querySelectorAll("[data-shortcut]")].find((one) => one.dataset.shortcut === event.key);
  if (link) link.click();
  const answers = [...document.querySelectorAll("article.sample")];
  const step = { j: 1, k: -1 }[event.key];
  if (!step || !answers.length) return;
  const next = answers[Math.max(0, answers.indexOf(document.activeElement.closest("article.sample")) + step)];
  if (next) next.focus();
}

// The curves of a run. They are read as a whole at first, after a change of the range, and when the page is
// looked at again. The server thins them, so a part that is chosen is read again too, and is then exact.
class Curves {
  constructor(section) {
    this.section = section;
    this.points = new Map();
    this.charts = new Map();
    this.marks = [];
    this.controls = section.querySelector(".controls");
    this.controls.hidden = false;
    this.controls.addEventListener("change", (event) => { if (event.target.name !== "smoothing") this.choose(); });
    this.controls.addEventListener("input", (event) => { if (event.target.name === "smoothing") this.drawAll(); });
    new ResizeObserver(() => this.resize()).observe(section);
    document.addEventListener("visibilitychange", () => this.follow());
    this.read();
    this.follow();
  }
  figures() { return [...this.section.querySelectorAll("figure[data-key]")]; }
  follow() {
    if (!this.section.dataset.live || document.hidden) {
      if (this.stream) this.stream.close();
      this.stream = null;
    } else if (!this.stream) {
      this.stream = new EventSource(this.section.dataset.live);
      // A stream that broke goes on where it was, so only a new one needs what was before it.
      this.stream.addEventListener("open", () => this.read(), { once: true });
      this.stream.addEventListener("points", (event) => this.add(JSON.parse(event.data)));
    }
  }
  chosen(name) { return this.controls.querySelector(`[name=${name}]`).value; }
  // Shows the range that the controls name, and puts it into the address of the page.
  choose(first, last) {
    if (first !== undefined) this.controls.querySelector("[name=first]").value = first;
    if (last !== undefined) this.controls.querySelector("[name=last]").value = last;
    const address = new URL(location.href);
    for (const name of ["range", "first", "last"]) {
      const value = this.chosen(name);
      if (value && value !== "all") address.searchParams.set(name, value);
      else address.searchParams.delete(name);
    }
    history.replaceState(null, "", address);
    this.read();
  }
  async read() {
    const keys = this.figures().map((figure) => figure.dataset.key).join(",");
    const asked = new URLSearchParams({ range: this.chosen("range"), keys });
    for (const name of ["first", "last"]) if (this.chosen(name)) asked.set(name, this.chosen(name));
    const answer = await fetch(`${this.section.dataset.curves}?${asked}`, { headers: { Accept: "application/json" } });
    if (!answer.ok || answer.redirected) return;
    const found = await answer.json();
    for (const [key, points] of Object.entries(found.curves)) this.points.set(key, points);
    this.marks = found.marks;
    this.section.querySelector(".marks").classList.add("shown");
    this.drawAll();
  }
  add(found) {
    const end = Number(this.chosen("last") || Infinity);
    for (const [key, added] of Object.entries(found.points)) {
      const points = this.points.get(key) || [];
      const last = points.length ? points[points.length - 1][0] : -1;
      this.points.set(key, points.concat(added.filter(([step]) => step > last && step <= end)));
    }
    this.drawAll();
  }
  drawAll() {
    const factor = Number(this.controls.querySelector("[name=smoothing]").value);
    for (const figure of this.figures()) {
      const points = this.points.get(figure.dataset.key) || [];
      if (points.length < 2) continue;
      const values = points.map(([, value]) => value);
      const data = [points.map(([step]) => step), smooth(values, factor)];
      const last = values[values.length - 1];
      figure.querySelector("figcaption b").textContent = last === null ? "NaN" : Number(last.toPrecision(4));
      const chart = this.charts.get(figure);
      if (chart) chart.setData(data);
      else this.charts.set(figure, this.make(figure, data));
    }
  }
  make(figure, data) {
    const box = figure.querySelector(".chart");
    box.replaceChildren();
    const axis = { stroke: css("--dim"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") } };
    const short = (_, values) => values.map((value) => Math.abs(value) < 1e-3 && value ? value.toExponential(0) : String(value));
    box.addEventListener("dblclick", () => this.choose("", ""));
    return new uPlot({
      width: box.clientWidth, height: 150, legend: { show: false },
      cursor: { y: false, drag: { x: true, setScale: false }, bind: { dblclick: () => null } },
      hooks: { setSelect: [(chart) => this.zoom(chart)], draw: [(chart) => this.drawMarks(chart)] },
      scales: { x: { time: false } }, axes: [{ ...axis, size: 28 }, { ...axis, size: 52, values: short }],
      series: [{}, { stroke: css("--accent"), width: 1.5, points: { show: false } }],
    }, data, box);
  }
  zoom(chart) {
    const { left, width } = chart.select;
    if (width < 4) return;
    const [first, last] = [left, left + width].map((place) => Math.max(0, Math.round(chart.posToVal(place, "x"))));
    chart.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    if (last > first) this.choose(first, last);
  }
  drawMarks(chart) {
    const { ctx, bbox } = chart;
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    for (const { step, kind } of this.marks) {
      if (step < chart.scales.x.min || step > chart.scales.x.max) continue;
      const x = Math.round(chart.valToPos(step, "x", true));
      ctx.strokeStyle = css(kind === "warning" ? "--warn" : "--good");
      ctx.setLineDash(kind === "warning" ? [] : [3 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + (kind === "warning" ? bbox.height / 6 : bbox.height));
      ctx.stroke();
    }
    ctx.restore();
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
  document.addEventListener("keydown", walk);
  for (const section of document.querySelectorAll("[data-curves]")) new Curves(section);
  if (document.querySelector("[data-poll]")) setInterval(readAgain, 3000);
});
