"use strict";
// Shows the state that the server sends, part by part. Data from nodes is text and never markup:
// elements are made here, and filled by textContent alone.

const state = {};
let span = null; // [began, ended] of a run that is over, in Unix seconds

const $ = (id) => document.getElementById(id);

function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") made.className = value;
    else made.setAttribute(name, value);
  }
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === "") continue;
    made.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return made;
}

function svg(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// --- figures

const count = (value) => value.toLocaleString("en");
const loss = (value) => (value === null || value === undefined ? "–" : value.toFixed(value < 10 ? 4 : 2));

function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) { value /= 1000; at += 1; }
  return `${value >= 100 || at === 0 ? value.toFixed(0) : value.toFixed(1)} ${units[at]}`;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const s = Math.round(seconds);
  if (s < 90) return `${s} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  const minutes = Math.round(s / 60);
  if (s < 172800) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${(s / 86400).toFixed(1)} days`;
}

const clock = (time) => new Date(time * 1000).toLocaleTimeString("en-GB");
const money = (value) => value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: value < 1 ? 4 : 2 });
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

// --- parts

const KIND = {
  running: "good", averaging: "good", ready: "good", idle: "still", halted: "still", waiting: "still",
  rebuilding: "busy", joining: "busy", suspected: "waits", "not heard": "waits", hangs: "bad", vacant: "bad",
};

function showRun(run) {
  $("name").textContent = run.name;
  document.title = `${run.name} · planaria`;
  $("about").textContent = `${run.id} · policy ${run.policy}`;
}

function showCondition({ word, sentence }) {
  $("word").textContent = word;
  $("word").parentElement.className = "condition " + ({ stopped: "bad", waiting: "waits", rebuilding: "busy" }[word] || "good");
  $("word").style.color = `var(--${{ stopped: "bad", waiting: "warn", paused: "warn", rebuilding: "busy", finished: "good" }[word] || "accent"})`;
  $("sentence").textContent = sentence;
}

function showProgress() {
  const { progress: at, run } = state;
  $("bar").firstElementChild.style.width = `${Math.min(100, (100 * at.step) / run.steps)}%`;
  $("bar").setAttribute("aria-valuenow", at.step);
  $("bar").setAttribute("aria-valuemax", run.steps);
  const figures = [
    ["step", count(at.step), `of ${count(run.steps)}`],
    ["loss", loss(at.loss), "nats a token"],
    ["validation", loss(at.validation), at.validation === null ? "not yet" : `perplexity ${Math.exp(at.validation).toPrecision(3)}`],
    ["learning rate", at.learning_rate.toExponential(2), `of step ${count(Math.max(1, at.step))}`],
    ["tokens/s", at.tokens_per_second === null ? "–" : count(Math.round(at.tokens_per_second)), `${short(at.tokens)} so far`],
    at.seconds_left === null && run.ended !== null
      ? ["took", duration(run.ended - run.began), `until ${clock(run.ended)}`]
      : ["left", duration(at.seconds_left), at.seconds_left === null || span !== null ? "" : `until ${clock(Date.now() / 1000 + at.seconds_left)}`],
    ["nodes", count(at.nodes), at.spent === null ? `${at.node_hours.toFixed(2)} node hours` : plural(at.rebuilds, "rebuild")],
  ];
  if (at.spent !== null) figures.push(["spent", money(at.spent), `${at.node_hours.toFixed(2)} node hours at ${run.price}`]);
  $("figures").replaceChildren(...figures.map(([name, value, note]) => el("div", {}, el("dt", {}, name), el("dd", {}, value, el("small", {}, note)))));
}

function short(value) {
  const units = ["", "k", "M", "G", "T"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) { value /= 1000; at += 1; }
  return `${at ? value.toPrecision(3) : value}${units[at]} tokens`;
}

function showStages() {
  const { stages, links } = state;
  const last = stages.length - 1;
  $("pipeline").replaceChildren(...stages.map((stage) => {
    const what = stage.stage === 0 ? "embedding and head" : stage.count > 1 ? plural(stage.count, "replica") : "blocks";
    const next = stage.stage === last ? 0 : stage.stage + 1;
    const slowest = (links || []).filter((link) => link.stages[0] === stage.stage && link.stages[1] === next)[0];
    const more = stage.count - stage.nodes.length;
    return el("li", { class: `stage ${KIND[stage.state] || "still"} ${stage.state === "vacant" ? "vacant" : ""}` },
      el("h3", {}, `stage ${stage.stage}`, el("em", {}, el("span", { class: "dot" }), stage.state)),
      el("p", {}, what),
      slowest ? el("p", {}, `to stage ${next}: ${slowest.mbps} Mbit/s, ${slowest.rtt_ms} ms`) : null,
      stage.nodes.map(showNode),
      more > 0 ? el("p", {}, `and ${count(more)} more`) : null);
  }));
}

function showNode(node) {
  const facts = [];
  if (node.device) facts.push(`${node.device}${node.host ? ` on ${node.host}` : ""}`);
  else if (node.host) facts.push(node.host);
  const figures = [];
  if (node.speed) figures.push(`${count(node.speed)} GFLOP/s`);
  if (node.memory) figures.push(`${bytes(node.memory)} memory`);
  const traffic = node.bytes_in || node.bytes_out ? `${bytes(node.bytes_in)} in, ${bytes(node.bytes_out)} out` : "";
  return el("div", { class: "node" },
    el("b", {}, el("code", { title: node.node }, node.node), node.driver ? el("i", { class: "tag" }, "driver") : null,
      node.leaving ? el("i", { class: "tag" }, "leaving") : null, el("span", {}, node.step ? `step ${count(node.step)}` : node.state)),
    el("p", {}, facts.join(", ")), figures.length ? el("p", {}, figures.join(", ")) : null, traffic ? el("p", {}, traffic) : null);
}

function showStandbys(standbys) {
  $("standbys").textContent = standbys.length ? `Standbys: ${standbys.map((node) => `${node.node} (${node.device || node.host})`).join(", ")}` : "";
}

function timed(item) {
  return [el("time", {}, clock(item.time)), item.sentence];
}

function showLines(name, lines) {
  const box = $(name), section = $(`of-${name}`);
  section.hidden = lines.length === 0;
  box.replaceChildren(...lines);
}

function showNews(news) {
  const box = $("news"), at = box.scrollTop;
  const lines = news.map((item) => el("li", { class: item.severity }, timed(item))).reverse();
  box.replaceChildren(...(lines.length ? lines : [el("li", {}, "No events yet.")]));
  box.scrollTop = at;
}

function showSamples(samples) {
  showLines("samples", samples.slice(-8).reverse().map((item) => el("div", { class: "sample" },
    el("small", {}, `step ${count(item.step)}`), el("b", {}, item.prompt), item.text)));
}

function showLinks(links) {
  const head = el("tr", {}, el("th", {}, "from"), el("th", {}, "to"), el("th", { class: "figure" }, "Mbit/s"), el("th", { class: "figure" }, "ms"));
  const place = (node, stage) => `${node} (${stage === null ? "standby" : `stage ${stage}`})`;
  const rows = links.slice(0, 40).map((item) => el("tr", {}, el("td", {}, place(item.from, item.stages[0])), el("td", {}, place(item.to, item.stages[1])),
    el("td", { class: "figure" }, item.mbps), el("td", { class: "figure" }, item.rtt_ms)));
  showLines("links", rows.length ? [head, ...rows] : []);
}

function showQuarantine(instances) {
  showLines("quarantine", instances.map((item) => el("li", { class: "warning" },
    `${item.node}, ${item.until === null ? "permanently" : `until ${clock(item.until)}`}${item.times > 1 ? `, ${item.times} times` : ""}: ${item.why}`)));
}

// --- the curve

function ticks(low, high, most) {
  const raw = (high - low) / Math.max(1, most) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
  const values = [];
  for (let at = Math.ceil(low / step); at * step <= high + step * 1e-9; at += 1) values.push(Number((at * step).toPrecision(12)));
  return values;
}

// An exponential moving average over about a 25th of the points. It restarts where the run was rolled back.
function smoothed(curve) {
  const decay = 1 - 1 / Math.max(2, curve.length / 25);
  let sum = 0, weight = 0;
  return curve.map((point) => {
    if (point === null) { sum = weight = 0; return null; }
    sum = decay * sum + point[1];
    weight = decay * weight + 1;
    return [point[0], sum / weight];
  });
}

function showLoss() {
  const { training, validation, marks } = state.loss;
  const box = $("chart"), points = training.filter(Boolean), checks = validation.filter(Boolean);
  if (points.length + checks.length === 0) {
    box.replaceChildren(el("p", { class: "empty" }, "No step is committed yet."));
    return;
  }
  const width = box.clientWidth || 600, height = Math.max(220, Math.min(380, width * 0.42));
  const left = 46, right = 16, top = 18, bottom = 30;
  const all = [...points, ...checks];
  const end = Math.max(10, ...all.map((point) => point[0])) * 1.01;
  let low = Math.min(...all.map((point) => point[1])), high = Math.max(...all.map((point) => point[1]));
  const margin = (high - low || 1) * 0.06;
  low -= margin; high += margin;
  const x = (step) => left + ((width - left - right) * step) / end;
  const y = (value) => top + ((height - top - bottom) * (high - value)) / (high - low);
  const drawn = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `Loss over steps, ${loss(state.progress.loss)} now` });
  for (const value of ticks(low, high, height / 60)) {
    drawn.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    drawn.append(svg("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, String(value)));
  }
  for (const step of ticks(0, end, width / 110)) {
    if (Number.isInteger(step)) drawn.append(svg("text", { x: x(step), y: height - 10, "text-anchor": "middle" }, count(step)));
  }
  for (const mark of marks) {
    drawn.append(svg("line", { class: `mark ${mark.kind}`, x1: x(mark.step), x2: x(mark.step), y1: top, y2: height - bottom }));
  }
  const line = (curve) => curve.map((point, at) => (point === null ? "" : `${curve[at - 1] ? "L" : "M"}${x(point[0]).toFixed(1)} ${y(point[1]).toFixed(1)}`)).join("");
  drawn.append(svg("path", { class: "loss", d: line(training) }), svg("path", { class: "loss smoothed", d: line(smoothed(training)) }));
  for (const [step, value] of checks) {
    const [cx, cy] = [x(step), y(value)];
    drawn.append(svg("path", { class: "validation", d: `M${cx} ${cy - 5.5}L${cx + 5.5} ${cy}L${cx} ${cy + 5.5}L${cx - 5.5} ${cy}Z` }));
  }
  for (const mark of marks) {
    if (mark.kind !== "lost") {
      const near = points.reduce((best, point) => (Math.abs(point[0] - mark.step) < Math.abs(best[0] - mark.step) ? point : best), points[0] || [0, high]);
      drawn.append(svg("circle", { class: `ring ${mark.kind}`, cx: x(mark.step), cy: y(near[1]), r: 5.5 }));
    } else {
      drawn.append(svg("circle", { class: "lost", cx: x(mark.step), cy: top, r: 3 }));
    }
  }
  const cross = svg("line", { class: "cross", y1: top, y2: height - bottom });
  const tip = el("div", { id: "tip" });
  drawn.append(cross);
  drawn.addEventListener("pointermove", (event) => {
    const step = ((event.clientX - drawn.getBoundingClientRect().left - left) / (width - left - right)) * end;
    const near = (list) => list.reduce((best, item) => (Math.abs(item[0] - step) < Math.abs(best[0] - step) ? item : best), list[0]);
    const point = near(points.length ? points : checks);
    const close = (at) => Math.abs(x(at) - x(point[0])) < 7;
    const lines = [`step ${count(point[0])}: ${loss(point[1])}`, ...checks.filter((item) => close(item[0])).map((item) => `validation ${loss(item[1])}`),
      ...marks.filter((item) => close(item.step)).map((item) => item.sentence)];
    tip.replaceChildren(...lines.slice(0, 6).map((line) => el("div", {}, line)));
    cross.setAttribute("x1", x(point[0]));
    cross.setAttribute("x2", x(point[0]));
    cross.style.visibility = tip.style.visibility = "visible";
    tip.style.top = `${top + 4}px`;
    tip.style.left = x(point[0]) < width / 2 ? `${x(point[0]) + 12}px` : "auto";
    tip.style.right = x(point[0]) < width / 2 ? "auto" : `${width - x(point[0]) + 12}px`;
  });
  drawn.addEventListener("pointerleave", () => { cross.style.visibility = tip.style.visibility = "hidden"; });
  box.replaceChildren(drawn, tip);
}

// --- updates

const SHOW = {
  run: () => showRun(state.run),
  condition: () => showCondition(state.condition),
  troubles: () => $("troubles").replaceChildren(...state.troubles.map((line) => el("li", {}, line))),
  progress: showProgress,
  stages: showStages,
  links: () => { showLinks(state.links); showStages(); },
  standbys: () => showStandbys(state.standbys),
  loss: showLoss,
  news: () => showNews(state.news),
  samples: () => showSamples(state.samples),
  cuts: () => showLines("cuts", state.cuts.map((item) => el("li", { class: item.severity }, item.sentence))),
  quarantine: () => showQuarantine(state.quarantine),
  evictions: () => showLines("evictions", state.evictions.map((item) => el("li", {}, timed(item))).reverse()),
  decisions: () => showLines("decisions", state.decisions.map((line) => el("li", {}, line)).reverse()),
};

function take(parts) {
  Object.assign(state, parts);
  for (const name of Object.keys(SHOW)) if (name in parts) SHOW[name]();
}

function connected(kind, text) {
  $("connection").className = kind;
  $("connection").textContent = text;
}

function watch() {
  const source = new EventSource("events");
  source.onopen = () => connected("live", "live");
  source.onmessage = (event) => take(JSON.parse(event.data));
  source.onerror = () => connected("lost", "no connection to the registry; this is its last known state");
}

// --- a run that is over

let wanted = null, asking = false;

async function showMoment(at) {
  wanted = at;
  $("clock").textContent = `${clock(at)}, ${duration(at - span[0])} in`;
  if (asking) return;
  asking = true;
  while (wanted !== null) {
    const moment = wanted;
    wanted = null;
    try {
      const answer = await fetch(`state?at=${moment}`);
      if (!answer.ok) throw new Error(await answer.text());
      take(await answer.json());
      connected("", "replay");
    } catch (error) {
      connected("lost", `no answer, move the slider to ask again: ${error.message}`);
    }
  }
  asking = false;
}

function replay() {
  const slider = $("moment");
  const at = () => Math.min(span[1], span[0] + ((span[1] - span[0]) * slider.value) / slider.max);
  connected("", "replay");
  $("replay").hidden = false;
  slider.addEventListener("input", () => showMoment(at()));
  let playing = null;
  $("play").addEventListener("click", () => {
    if (playing !== null) { clearInterval(playing); playing = null; }
    else {
      if (slider.value === slider.max) slider.value = 0;
      playing = setInterval(() => {
        slider.value = Number(slider.value) + 5;
        showMoment(at());
        if (slider.value === slider.max) { clearInterval(playing); playing = null; $("play").textContent = "▶"; }
      }, 150);
    }
    $("play").textContent = playing === null ? "▶" : "❚❚";
  });
  const start = Number(new URLSearchParams(location.search).get("at"));
  if (start >= 0 && start <= 1 && location.search.includes("at=")) slider.value = start * slider.max;
  showMoment(at());
}

async function begin() {
  span = await (await fetch("span")).json();
  if (span === null) watch();
  else replay();
  let width = 0;
  new ResizeObserver(() => {
    if (state.loss && $("chart").clientWidth !== width) { width = $("chart").clientWidth; showLoss(); }
  }).observe($("chart"));
}

begin();
