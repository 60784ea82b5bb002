// What moves on the pages: times in the browser's zone, curves, and parts that are read again.
"use strict";

const FIRST_PAUSE_MS = 3000, LONGEST_PAUSE_MS = 60_000;
const shownParts = new Map();  // the source of each part that was read again

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
    if (typeof value !== "number") return value;
    last = last === null ? value : factor * last + (1 - factor) * value;
    return last;
  });
}

const showKeys = () => { if (!document.getElementById("keys").open) document.getElementById("keys").showModal(); };

// The keys that the page's help lists. One key follows a link that names it, and j and k walk through the
// answers of a group. While a person writes or the help is open, a key is only a key.
function walk(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog[open]")) return;
  if (event.key === "?" && document.getElementById("keys")) showKeys();
  const search = event.key === "/" && document.querySelector("main input[type=search]");
  if (search) {
    event.preventDefault();
    search.focus();
  }
  const link = [...document.querySelectorAll("[data-shortcut]")].find((one) => one.dataset.shortcut === event.key);
  if (link) link.click();
  const answers = [...document.querySelectorAll("article.sample")];
  const step = { j: 1, k: -1 }[event.key];
  if (!step || !answers.length) return;
  const next = answers[Math.max(0, answers.indexOf(document.activeElement.closest("article.sample")) + step)];
  if (next) next.focus();
}

const NOISE = 1e-8;  // A smaller number is the noise of its computation, and is shown as 0.
const quiet = (value) => Math.abs(value) < NOISE && value !== null ? 0 : value;
const short = (value) => value === null ? "NaN" : Number(quiet(value).toPrecision(4));

// The text at an address, or null without one: the server is away, it refuses, or the session has ended.
async function get(address, kind) {
  try {
    const answer = await fetch(address, { headers: { Accept: kind } });
    document.getElementById("stale").hidden = !answer.redirected;
    return answer.ok && !answer.redirected ? await answer.text() : null;
  } catch {
    return null;
  }
}

function intervalText(text) {
  return Object.assign(document.createElement("small"), { className: "dim", title: "95 % interval", textContent: text });
}

const CHART_HEIGHT = 150;
const WHOLE_STEPS = [...Array(10).keys()].flatMap((power) => [1, 2, 5].map((n) => n * 10 ** power));

// As wide as the longest label of the axis needs.
const labelWidth = (chart, values) => Math.max(52, 18 + 8 * Math.max(0, ...(values || []).map((value) => String(value).length)));

// A chart of values by step, with a line of each colour. Lines from the second on have dots, if they are asked for.
function chartIn(box, data, colours, { hasDots, ...options }) {
  const axis = { stroke: css("--dim"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line") } };
  const ticks = (_, values) => values.map((value) => Math.abs(value) < 1e-3 && value ? value.toExponential(0) : String(value));
  return new uPlot({
    width: box.clientWidth, height: box.clientHeight || CHART_HEIGHT, legend: { show: false },
    scales: { x: { time: false } },
    axes: [{ ...axis, size: 28, incrs: WHOLE_STEPS }, { ...axis, size: labelWidth, values: ticks }],
    series: [{}, ...colours.map((stroke) => ({ stroke, width: 1.5, points: { show: (chart, line) => chart.data[0].length === 1 || Boolean(hasDots && line > 1) } }))],
    ...options,
  }, data, box);
}

function fit(charts) {
  for (const [figure, chart] of charts) {
    const box = figure.querySelector(".chart");
    if (box.clientWidth) chart.setSize({ width: box.clientWidth, height: box.clientHeight || CHART_HEIGHT });
  }
}

// The curves of several runs in common axes. Draw over a part to enlarge it; press twice to see all again.
class Comparison {
  constructor(section) {
    this.section = section;
    this.charts = new Map();
    this.keys = [...document.querySelectorAll(".key[data-run]")];
    this.smoothing = section.querySelector("[name=smoothing]");
    section.querySelector(".controls").hidden = false;
    this.smoothing.addEventListener("input", () => this.draw());
    new ResizeObserver(() => fit(this.charts)).observe(section);
    this.read();
  }
  async read() {
    const text = await get(this.section.dataset.compare, "application/json");
    if (text === null) return;
    this.runs = new Map(Object.entries(JSON.parse(text).runs));
    this.draw();
  }
  draw() {
    if (!this.runs) return;
    for (const figure of this.section.querySelectorAll("figure[data-key]")) {
      const curves = this.keys.map((key) => new Map((this.runs.get(key.dataset.run) || {})[figure.dataset.key]));
      // Of the steps of all runs. null leaves a gap, and undefined, where a run has no point, leaves none.
      const steps = [...new Set(curves.flatMap((curve) => [...curve.keys()]))].sort((a, b) => a - b);
      const lines = curves.map((curve) => smooth(steps.map((step) => curve.get(step)), Number(this.smoothing.value)));
      const chart = this.charts.get(figure), box = figure.querySelector(".chart");
      if (chart) chart.setData([steps, ...lines], false);
      else {
        box.replaceChildren();
        const colours = this.keys.map((key) => getComputedStyle(key).backgroundColor);
        this.charts.set(figure, chartIn(box, [steps, ...lines], colours, { cursor: { y: false, drag: { x: true } } }));
      }
    }
  }
}

// The curves of a run. They are read as a whole at first, after a change of the range, and when the page is
// looked at again. The server thins them, so a part that is chosen is read again too, and is then exact.
class Curves {
  constructor(section) {
    this.section = section;
    this.points = new Map();
    this.charts = new Map();
    this.marks = [];
    this.pauseMs = FIRST_PAUSE_MS;
    this.controls = section.querySelector(".controls");
    this.controls.querySelector("[hidden]").hidden = false;
    this.controls.addEventListener("change", (event) => this.change(event.target.name));
    this.controls.addEventListener("input", (event) => { if (event.target.name === "smoothing") this.drawAll(); });
    document.getElementById("view").addEventListener("submit", (event) => {
      if (event.submitter && !this.controls.contains(event.submitter)) return;
      event.preventDefault();
      this.choose();
    });
    new ResizeObserver(() => fit(this.charts)).observe(section);
    for (const folded of section.querySelectorAll("details")) folded.addEventListener("toggle", () => this.drawAll());
    document.addEventListener("visibilitychange", () => this.follow());
    this.read();
    this.follow();
  }
  figures() { return [...this.section.querySelectorAll("figure[data-keys]")]; }
  keysOf(figure) { return figure.dataset.keys.split(","); }
  // The names of the ends of a figure's 95 % intervals, and their points as [step, low, high].
  intervalKeys(figure) {
    const legend = figure.querySelector("[data-interval]");
    return legend ? ["low", "high"].map((end) => `${legend.dataset.interval}/${end}`) : [];
  }
  intervals(figure) {
    const [low, high] = this.intervalKeys(figure).map((key) => new Map(this.points.get(key)));
    const found = [...(low || [])].map(([step, value]) => [step, value, high.get(step)]);
    return found.filter((one) => one.every((value) => typeof value === "number"));
  }
  follow() {
    if (!this.section.dataset.live || document.hidden) {
      if (this.stream) this.stream.close();
      this.stream = null;
    } else if (!this.stream) {
      const stream = this.stream = new EventSource(this.section.dataset.live);
      // A stream that broke goes on where it was, so only a new one needs what was before it.
      stream.addEventListener("open", () => this.read(), { once: true });
      stream.addEventListener("open", () => this.goOn());
      stream.addEventListener("points", (event) => this.add(JSON.parse(event.data)));
      stream.addEventListener("error", () => this.retry(stream));
    }
  }
  goOn() {
    this.pauseMs = FIRST_PAUSE_MS;
    if (this.hasFollowed) readAgain();
    this.hasFollowed = true;
  }
  // The browser itself connects again, but not after an answer that is an error, such as that of a server that
  // starts, and not after the end of the run, which the curves tell.
  retry(stream) {
    if (stream.readyState !== EventSource.CLOSED || stream !== this.stream) return;
    this.stream = null;
    setTimeout(() => this.read().finally(() => this.follow()), this.pauseMs);
    this.pauseMs = Math.min(2 * this.pauseMs, LONGEST_PAUSE_MS);
  }
  control(name) { return this.controls.querySelector(`[name=${name}]`); }
  chosen(name) { return this.control(name).value; }
  // A range is a time before now or two steps, so a new one takes the place of the other.
  change(name) {
    if (name === "range" && this.chosen("range") === "custom") {
      this.control("first").focus();
    } else if (name === "range") {
      this.choose("", "");
    } else if (name === "smoothing") {
      this.remember();
    } else {
      this.choose();
    }
  }
  // Shows the range that the controls name, and puts it into the address of the page.
  choose(first = this.chosen("first"), last = this.chosen("last"), range = this.chosen("range")) {
    const name = first || last ? "custom" : range === "custom" ? "all" : range;
    this.control("first").value = first;
    this.control("last").value = last;
    this.control("range").value = name;
    this.control("last").min = first || 0;
    if (!["first", "last"].every((one) => this.control(one).reportValidity())) return;
    this.remember();
    this.read();
  }
  remember() {
    const address = new URL(location.href);
    for (const name of ["range", "first", "last", "smoothing"]) {
      const value = this.chosen(name);
      if (value && !["all", "custom", "0"].includes(value)) address.searchParams.set(name, value);
      else address.searchParams.delete(name);
    }
    history.replaceState(null, "", address);
  }
  async read() {
    const keys = this.figures().flatMap((figure) => [...this.keysOf(figure), ...this.intervalKeys(figure)]).join(",");
    const asked = new URLSearchParams({ range: this.chosen("range"), keys });
    for (const name of ["first", "last"]) if (this.chosen(name)) asked.set(name, this.chosen(name));
    const text = await get(`${this.section.dataset.curves}?${asked}`, "application/json");
    if (text === null) return;
    const found = JSON.parse(text);
    if (found.has_ended && this.section.dataset.live) {
      // It ended between the page and its stream, so no message says it.
      delete this.section.dataset.live;
      this.section.dataset.state = found.status;
      readAgain();
    }
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
    if (found.figures) this.showState(found);
  }
  showState(found) {
    const texts = [...document.querySelectorAll("#figures dd"), document.querySelector("#progress span")];
    [...found.figures, found.progress].forEach((text, place) => {
      texts[place].textContent = text;
      if (place < found.figures.length) texts[place].parentElement.hidden = text === "—";
      if (found.intervals[place]) texts[place].append(" ", intervalText(found.intervals[place]));
    });
    const bar = document.querySelector("#progress progress");
    if (bar) bar.value = found.part || 0;
    if (found.state === this.section.dataset.state) return;
    this.section.dataset.state = found.state;
    readAgain();
  }
  drawAll() {
    const factor = Number(this.controls.querySelector("[name=smoothing]").value);
    for (const figure of this.figures()) {
      const lines = this.keysOf(figure).map((key) => this.points.get(key) || []);
      const chart = this.charts.get(figure);
      if (lines.every((points) => points.length < 2) && !chart) continue;
      figure.hidden = false;
      lines.forEach((points, place) => {
        const caption = figure.querySelectorAll("figcaption > [data-line]")[place];
        caption.hidden = !points.length;
        caption.querySelector("b").textContent = points.length ? short(points[points.length - 1][1]) : "—";
      });
      for (const legend of figure.querySelectorAll("[data-interval]")) legend.hidden = !this.intervals(figure).length;
      // Of the steps of all lines. undefined, where a line has no point, leaves no gap.
      const values = lines.map((points) => new Map(points.map(([step, value]) => [step, quiet(value)])));
      const steps = [...new Set(values.flatMap((line) => [...line.keys()]))].sort((a, b) => a - b);
      const data = [steps, ...values.map((line) => smooth(steps.map((step) => line.get(step)), factor))];
      if (chart) chart.setData(data);
      else if (figure.querySelector(".chart").clientWidth) this.charts.set(figure, this.make(figure, data));
    }
  }
  make(figure, data) {
    const box = figure.querySelector(".chart");
    box.replaceChildren();
    box.addEventListener("dblclick", () => this.choose("", "", "all"));
    const colours = data.length > 2 ? [...figure.querySelectorAll(".key")].map((key) => getComputedStyle(key).backgroundColor) : [css("--accent")];
    const ends = () => this.intervals(figure).flatMap(([, low, high]) => [low, high]);
    const range = (_, least, most) => least === null ? [null, null] : uPlot.rangeNum(Math.min(least, ...ends()), Math.max(most, ...ends()), 0.1, true);
    return chartIn(box, data, colours, {
      hasDots: true,
      scales: { x: { time: false }, y: { range } },
      cursor: { y: false, drag: { x: true, setScale: false }, bind: { dblclick: () => null } },
      hooks: { setSelect: [(chart) => this.zoom(chart)], drawAxes: [(chart) => this.drawIntervals(chart, figure, colours[1])], draw: [(chart) => this.drawMarks(chart)] },
    });
  }
  zoom(chart) {
    const { left, width } = chart.select;
    if (width < 4) return;
    const [first, last] = [left, left + width].map((place) => Math.max(0, Math.round(chart.posToVal(place, "x"))));
    chart.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    if (last > first) this.choose(first, last);
  }
  drawIntervals(chart, figure, colour) {
    const { ctx } = chart;
    ctx.save();
    ctx.lineWidth = 1.5 * devicePixelRatio;
    ctx.strokeStyle = colour;
    ctx.globalAlpha = 0.7;
    ctx.beginPath();
    for (const [step, low, high] of this.intervals(figure)) {
      const x = chart.valToPos(step, "x", true);
      ctx.moveTo(x, chart.valToPos(low, "y", true));
      ctx.lineTo(x, chart.valToPos(high, "y", true));
    }
    ctx.stroke();
    ctx.restore();
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
}

// Reads the page again, and puts in what is new. What a person has marked or scrolled stays.
async function readAgain() {
  if (document.hidden || !document.querySelector("[data-poll]")) return;
  const text = await get(location.href, "text/html");
  if (text === null) return;
  const page = new DOMParser().parseFromString(text, "text/html");
  for (const old of document.querySelectorAll("[data-poll]")) {
    const fresh = page.getElementById(old.id);
    if (!fresh || old.contains(document.activeElement) || shownParts.get(old.id) === fresh.innerHTML) continue;
    shownParts.set(old.id, fresh.innerHTML);
    showTimes(fresh);
    const marked = new Set([...old.querySelectorAll("input:checked")].map((box) => box.value));
    for (const box of fresh.querySelectorAll("input[type=checkbox]")) box.checked = marked.has(box.value);
    const opened = new Set([...old.querySelectorAll("details[open]")].map((one) => one.id));
    for (const folded of fresh.querySelectorAll("details")) if (opened.has(folded.id)) folded.open = true;
    const places = [...old.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
    old.replaceChildren(...fresh.childNodes);
    [...old.querySelectorAll(".scroll")].forEach((one, place) => { one.scrollLeft = places[place] || 0; });
  }
}

// The stream of a run in training says when its page has changed. Of one that waits, it does not say why.
function readAgainLater() {
  const curves = document.querySelector("[data-curves]");
  const ms = !curves ? 3000 : curves.dataset.state === "running, train" ? 60_000 : 6000;
  setTimeout(() => readAgain().finally(readAgainLater), ms);
}

document.addEventListener("DOMContentLoaded", () => {
  showTimes(document);
  document.addEventListener("submit", askBefore);
  document.addEventListener("keydown", walk);
  const opener = document.getElementById("show-keys");
  if (opener) {
    opener.hidden = false;
    opener.addEventListener("click", showKeys);
  }
  for (const section of document.querySelectorAll("[data-curves]")) new Curves(section);
  for (const section of document.querySelectorAll("[data-compare]")) new Comparison(section);
  if (document.querySelector("[data-poll]")) readAgainLater();
});
