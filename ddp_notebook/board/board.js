// The live board: what anywidget loads in the browser. No build step, nothing to load, no innerHTML:
// whatever a rank prints, names or raises is put into the page as text.
//
// First, pure functions: words, ranks, scales, the store of slices. `node --test` tests them.
// Then what draws: the rows, the timeline, the rest of the page, and the entry for anywidget.

// ---- words

export const ROLES = {
  culprit: ["✗", "culprit", "bad"],
  late: ["►", "late", "warn"],
  dead: ["†", "dead", "bad"],
  failed: ["✗", "failed", "bad"],
  silent: ["?", "silent", "idle"],
  paused: ["‖", "paused", "paused"],
  waiting: ["…", "waiting", "warn"],
  running: ["▶", "running", "busy"],
  ready: ["✓", "ready", "ok"],
  raised: ["✗", "raised", "bad"],
  refused: ["✗", "refused", "bad"],
  ended: ["■", "ended", "idle"],
};

export function lookOf({ role, status, word: own }) {
  const [mark, word, tone] = ROLES[role] ?? ["·", role, "idle"];
  const dead = role === "culprit" && status === "dead";
  const inSetup = role === "running" && status !== "running";
  return { mark: dead ? "†" : mark, word: dead ? "dead" : inSetup ? own || status : word, tone };
}

/** A time span in words, from microseconds: `12 µs`, `3.4 ms`, `1.5 s`, `4 min`. */
export function formatSpan(us) {
  const size = Math.abs(us);
  if (size < 1000) return `${Math.round(us)} µs`;
  if (size < 1e6) return `${trim(us / 1e3)} ms`;
  if (size < 119.5e6) return `${trim(us / 1e6)} s`;
  return size < 7170e6 ? `${Math.round(us / 60e6)} min` : `${Math.round(us / 3600e6)} h`;
}

const trim = (value) => (Math.abs(value) < 9.95 ? value.toFixed(1).replace(".0", "") : value.toFixed(0));

/** A time on the axis, as exact as `step` between two of them asks for. */
export function formatTick(at, step) {
  const [unit, worth] = [["s", 1e6], ["ms", 1e3], ["µs", 1]].find(([, each]) => Math.abs(at) >= each) ?? ["µs", 1];
  const digits = Math.max(0, Math.ceil(Math.log10(worth / step) - 1e-9));
  return at ? `${(at / worth).toFixed(digits)} ${unit}` : "0";
}

/** An age for a glance: a healthy rank's does not flicker. */
export function formatAge(us) {
  if (us < 1e6) return "< 1 s";
  return us < 119.5e6 ? `${Math.round(us / 1e6)} s` : formatSpan(us);
}

export function formatBytes(count) {
  for (const [unit, worth] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (count >= worth) return `${(count / worth).toFixed(1).replace(".0", "")} ${unit}`;
  return `${count} B`;
}

// ---- ranks

/** The members of a rank set as it is written: `0,2-4`. */
export function parseRanks(text) {
  const ranks = [];
  for (const part of text ? text.split(",") : []) {
    const [first, last] = part.split("-").map(Number);
    for (let rank = first; rank <= (last ?? first); rank++) ranks.push(rank);
  }
  return ranks;
}

/** The inverse of `parseRanks`. */
export function formatRanks(ranks) {
  const runs = [];
  for (const rank of [...new Set(ranks)].sort((a, b) => a - b)) {
    const last = runs.at(-1);
    if (last && rank === last[1] + 1) last[1] = rank;
    else runs.push([rank, rank]);
  }
  return runs.map(([a, b]) => (a === b ? `${a}` : `${a}-${b}`)).join(",");
}

export const nameRanks = (text) => `rank${/^\d+$/.test(text) ? "" : "s"} ${text}`;

/** A magic for chosen ranks; those replace ranks that it names itself. */
export function magicFor(action, chosen) {
  if (!action.takes_ranks || !chosen.size) return action.magic;
  return `${action.magic.replace(/ --ranks \S+/, "")} --ranks ${formatRanks(chosen)}`;
}

/** Who waits for whom, by index of row: one bracket per set of rows that others wait for. */
export function brackets(rows) {
  const rowOf = new Map();
  rows.forEach(({ ranks }, row) => parseRanks(ranks).forEach((rank) => rowOf.set(rank, row)));
  const byTarget = new Map();
  rows.forEach(({ waits_for }, row) => {
    const targets = new Set(parseRanks(waits_for).map((rank) => rowOf.get(rank)));
    targets.delete(undefined);
    targets.delete(row);
    if (!targets.size) return;
    const to = [...targets].sort((a, b) => a - b);
    const key = to.join();
    if (!byTarget.has(key)) byTarget.set(key, { from: [], to });
    byTarget.get(key).from.push(row);
  });
  return [...byTarget.values()];
}

// ---- slices

const [RANK, NUMBER, KIND, SEQ_ID, ISSUED, DONE, PHASE, HELD] = [0, 1, 2, 3, 4, 5, 6, 7];
const COLLECTIVE = 8; // added here: what it shares with the slices of the other ranks
const [OPERATION, API, PART, BUCKET, GROUP, DTYPE, SHAPE, BYTES, REDUCE, PEER, CALL_SITE, CODE, LABEL] =
  Array(13).keys();
export const PHASES = ["paused", "issued", "done", "failed", "refused", "freed"];
const MOST_SLICES = 40_000;
const MOST_PER_RANK = 2_000;
const MOST_COLLECTIVES = 20_000;

/** The slices of one run, as many as fit: the oldest of each rank go first. */
export class Store {
  constructor(worldSize = 1) {
    this.resize(worldSize);
    this.generation = -1;
    this.forget();
  }

  resize(worldSize) {
    this.perRank = Math.max(8, Math.min(MOST_PER_RANK, Math.floor(MOST_SLICES / Math.max(1, worldSize))));
  }

  forget() {
    this.kinds = [];
    this.rows = new Map();
    this.collectives = new Map();
    this.skipped = 0;
    this.first = Infinity;
    this.last = 0; // of what ended by itself: what waited until it was freed must not squeeze the rest
    this.end = 0;
    this.pending = 0;
  }

  /** Add a message; false if one before it was missed: then all must be requested. */
  take(message) {
    if (message.generation !== this.generation) {
      this.forget();
      this.generation = message.generation;
    }
    if (message.first_kind > this.kinds.length) return false;
    message.kinds.forEach((kind, i) => (this.kinds[message.first_kind + i] = kind));
    message.slices.forEach((slice) => this.add(slice));
    this.skipped = message.skipped;
    return true;
  }

  add(slice) {
    let row = this.rows.get(slice[RANK]);
    if (!row) this.rows.set(slice[RANK], (row = { list: [], at: new Map() }));
    const known = row.at.get(slice[NUMBER]);
    if (known) {
      this.pending += (isOpen(slice) ? 1 : 0) - (isOpen(known) ? 1 : 0);
      known.splice(0, slice.length, ...slice);
      slice = known;
    } else {
      row.at.set(slice[NUMBER], slice);
      const before = row.list.at(-1);
      row.list.push(slice);
      if (before && before[NUMBER] > slice[NUMBER]) row.list.sort((a, b) => a[NUMBER] - b[NUMBER]);
      if (isOpen(slice)) this.pending++;
      if (row.list.length > this.perRank * 1.25) this.trim(row);
    }
    this.join(slice);
    if (slice[ISSUED]) this.first = Math.min(this.first, cameAt(slice));
    this.end = Math.max(this.end, slice[ISSUED], slice[DONE]);
    this.last = Math.max(this.last, slice[ISSUED], PHASES[slice[PHASE]] === "freed" ? 0 : slice[DONE]);
  }

  trim(row) {
    for (const gone of row.list.splice(0, row.list.length - this.perRank)) {
      row.at.delete(gone[NUMBER]);
      if (isOpen(gone)) this.pending--;
    }
    this.first = Infinity;
    for (const { list } of this.rows.values()) this.first = Math.min(this.first, cameAt(list[0]));
  }

  /** One collective of several ranks: when the last of them issued it, and which that was. */
  join(slice) {
    const kind = this.kinds[slice[KIND]];
    if (!kind || kind[PEER] >= 0 || ["paused", "refused", "freed"].includes(PHASES[slice[PHASE]])) return;
    const key = `${kind[GROUP]}/${slice[SEQ_ID]}`;
    let collective = this.collectives.get(key);
    if (!collective) this.collectives.set(key, (collective = { size: 0, last: -Infinity, first: Infinity }));
    if (slice[COLLECTIVE] !== collective) collective.size++;
    slice[COLLECTIVE] = collective;
    collective.first = Math.min(collective.first, slice[ISSUED]);
    if (slice[ISSUED] > collective.last) [collective.last, collective.lastRank] = [slice[ISSUED], slice[RANK]];
    if (this.collectives.size > MOST_COLLECTIVES) this.collectives.delete(this.collectives.keys().next().value);
  }

  /** The index of the first slice of a row that may reach into `from`. */
  startOf(list, from) {
    let [low, high] = [0, list.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (list[middle][ISSUED] < from) low = middle + 1;
      else high = middle;
    }
    while (low > 0 && (isOpen(list[low - 1]) || list[low - 1][DONE] >= from)) low--;
    return Math.max(0, low - 1);
  }

  /** What of a rank's row reaches into a part of time. */
  seen(rank, from, to) {
    const list = this.rows.get(rank)?.list ?? [];
    const start = this.startOf(list, from);
    let end = start;
    while (end < list.length && cameAt(list[end]) <= to) end++;
    return list.slice(start, end);
  }

  /** A slice in words, line by line. */
  describe(slice, now) {
    const kind = this.kinds[slice[KIND]];
    if (!kind) return [];
    const phase = PHASES[slice[PHASE]];
    const reduce = kind[REDUCE] && kind[REDUCE] !== "SUM" ? `(${kind[REDUCE]})` : "";
    const lines = [`rank ${slice[RANK]} · ${kind[OPERATION]}${reduce} · ${phase} · #${slice[NUMBER]}`];
    const of = [kind[DTYPE] && `${kind[DTYPE]} [${kind[SHAPE].join(", ")}]`, kind[BYTES] && formatBytes(kind[BYTES])];
    const part = kind[BUCKET] ? `bucket ${kind[BUCKET]} of DDP's backward` : kind[PART] && `DDP's ${kind[PART]}`;
    const peer = kind[PEER] >= 0 && `${kind[OPERATION] === "send" ? "to" : "from"} rank ${kind[PEER]}`;
    const what = [...of, part || kind[API], peer, kind[LABEL]].filter(Boolean).join(" · ");
    if (what) lines.push(what);
    if (kind[CALL_SITE]) lines.push(kind[CODE] ? `${kind[CALL_SITE]}   ${kind[CODE]}` : kind[CALL_SITE]);
    const how = { paused: "paused for", issued: "waits for", freed: "freed after", done: "took" }[phase] ?? "ended after";
    lines.push(`${how} ${formatSpan(endOf(slice, now) - slice[ISSUED])}`);
    if (slice[HELD]) lines.splice(-1, 0, `paused for ${formatSpan(slice[HELD])} before it: that is no time of the collective`);
    const collective = slice[COLLECTIVE];
    if (collective && collective.size > 1 && collective.last > slice[ISSUED])
      lines[lines.length - 1] += ` · waited ${formatSpan(collective.last - slice[ISSUED])} for rank ${collective.lastRank}`;
    else if (collective && collective.lastRank === slice[RANK] && collective.last > collective.first)
      lines[lines.length - 1] += ` · last to arrive, ${formatSpan(collective.last - collective.first)} after the first`;
    return lines;
  }
}

const isOpen = (slice) => slice[PHASE] < 2;
/** When the rank called it; if it was paused, it was issued later. */
const cameAt = (slice) => slice[ISSUED] - (slice[HELD] || 0);
const endOf = (slice, now) => (isOpen(slice) ? now : slice[DONE] || slice[ISSUED]);

/** Whether a slice was issued well before `until`; the end of the one before is recorded a bit late. */
const within = (slice, until, now) => slice[ISSUED] + 0.2 * (endOf(slice, now) - slice[ISSUED]) < until;

/** Whether slices of a row overlap in time. */
export function overlap(slices, now) {
  let until = -Infinity;
  for (const slice of slices) {
    if (within(slice, until, now)) return true;
    until = Math.max(until, endOf(slice, now));
  }
  return false;
}

/**
 * Where slices of a row are drawn, from left to right: `place(slice, x0, x1, top, tall)`, the last two
 * as parts of the row's height. Of slices that would cover each other one is placed. Slices that
 * overlap in time are drawn below each other where there is room for two.
 */
export function layOut(slices, x, now, roomForTwo, place) {
  const floors = roomForTwo && overlap(slices, now) ? 2 : 1;
  const covered = [-Infinity, -Infinity];
  const ends = [-Infinity, -Infinity];
  for (const slice of slices) {
    const until = endOf(slice, now);
    const floor = floors > 1 && within(slice, ends[0], now) ? 1 : 0;
    ends[floor] = Math.max(ends[floor], until);
    const x0 = x(cameAt(slice));
    const x1 = Math.max(x(until), x0 + 1.5);
    if (x1 < covered[floor] + 0.5) continue;
    covered[floor] = x1;
    place(slice, x0, x1, floor / floors, 1 / floors);
  }
}

/** The part of time that is shown: it follows the end until the user moves it. */
export class Window {
  constructor() {
    this.follow = true;
    [this.from, this.to] = [0, 1e6];
  }

  /** Follow the newest slices and pending ones; true while time alone moves the window. */
  update(store, now) {
    if (!this.follow || !store.rows.size) return false;
    let from = Infinity;
    for (const { list } of store.rows.values()) from = Math.min(from, cameAt(list[Math.max(0, list.length - 24)]));
    const shown = Math.max(store.last - from, 200);
    // A long wait must not push its history out of sight.
    const to = store.pending ? Math.min(now, store.last + Math.max(0.4 * shown, 2e4)) : store.last + 0.03 * shown;
    const near = this.set && Math.abs(this.from - from) < 0.04 * shown && to <= this.to && to > this.to - 0.2 * shown;
    if (!near) [this.from, this.to, this.set] = [from - 0.02 * shown, Math.max(to, from + 100), true];
    return store.pending > 0 && now <= this.to;
  }

  get span() {
    return this.to - this.from;
  }

  zoom(factor, at = 0.5) {
    this.follow = false;
    const span = Math.min(Math.max(this.span * factor, 20), 864e8);
    const anchor = this.from + at * this.span;
    this.from = anchor - at * span;
    this.to = this.from + span;
  }

  pan(share) {
    this.follow = false;
    const by = share * this.span;
    this.from += by;
    this.to += by;
  }

  /** Show `middle`, keep how much is shown. */
  centre(middle) {
    this.pan((middle - this.span / 2 - this.from) / this.span);
  }

  fit(store, now) {
    this.follow = false;
    const end = store.pending ? Math.max(now, store.end) : store.end;
    const span = Math.max(end - store.first, 100);
    [this.from, this.to] = [store.first - 0.02 * span, end + 0.02 * span];
  }
}

/** A rank's height in pixels: 64 ranks fit on a screen, and 1,024 too. */
export function rowHeight(worldSize) {
  for (const [most, height] of [[8, 24], [16, 16], [32, 11], [64, 7]]) if (worldSize <= most) return height;
  return Math.max(0.45, 460 / worldSize);
}

/** Round times inside a span, some six of them. */
export function ticks(from, to, most = 6) {
  const rough = (to - from) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const times = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) times.push(at);
  return times;
}

// ---- the page

/** An element; children are elements or text, and text stays text. */
function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child || child === 0));
  return element;
}

/** Children are replaced only when what they show changed: focus and open details stay. */
function show(element, key, children) {
  const shown = JSON.stringify(key);
  if (element.shownKey === shown) return false;
  element.shownKey = shown;
  element.replaceChildren(...[children()].flat(2).filter(Boolean));
  return true;
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = make("textarea", { class: "ddpb-copying" });
    area.value = text;
    button.after(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

const copyButton = (text, of) =>
  make("button", { class: "ddpb-small", type: "button", "aria-label": `Copy ${of}`, onclick: (e) => copy(text, e.currentTarget) }, "Copy");

const LOST_AFTER_MS = 10_000; // a kernel sends something every two seconds while it is busy or watched
const ASK_AFTER_MS = 4_000; // an idle one that knows of no page is asked first
const SLEPT_MS = 5_000; // between two looks: the page slept, and knows nothing of that time
const HERE_EVERY_MS = 60_000;

const ENDED = "These ranks ended with their kernel. Run this cell again.";
const SAVED = "This board was saved. Its ranks are not connected with this page. For live ones run this cell again.";

class Page {
  /** `guarded` runs what is drawn later, while the page exists. */
  constructor(model, store, guarded) {
    this.model = model;
    this.store = store;
    this.guarded = guarded;
    this.view = crypto.randomUUID?.() ?? String(Math.random());
    this.chosen = new Set();
    this.past = null;
    this.messageAt = this.tickAt = performance.now();
    this.hereAt = -Infinity;
    this.el = make("div", { class: "ddpb", role: "region", "aria-label": "Board of the ranks" });
    const part = (name, attributes = {}) => {
      this[name] = make(attributes.tag ?? "div", { class: `ddpb-${name}`, ...attributes, tag: null });
      return this[name];
    };
    this.timeline = new Timeline(this);
    this.el.append(
      make("style", {}, `.ddp-still-${model.get("still")}, .jp-OutputArea-child:has(.ddp-still-${model.get("still")}) { display: none }`),
      part("head"),
      part("gone", { role: "status" }),
      part("loading", { hidden: true }),
      part("findings", { role: "status" }),
      part("benchmark"),
      part("actions", { role: "toolbar", "aria-label": "What can be done" }),
      part("rows", { role: "list", "aria-label": "Ranks" }),
      this.timeline.el,
      part("sources"),
      part("answers", { "aria-live": "polite" }),
      part("notes", { tag: "ul" }),
    );
  }

  get board() {
    return this.past ?? this.get("board");
  }

  /** A part of the state: as it is told now, else as the notebook has it of the end of the cell. */
  get(name) {
    return this.store.state?.[name] ?? this.model.get(name);
  }

  /** Microseconds since the session's epoch; those of the last drawing where no kernel answers. */
  now() {
    const board = this.get("board");
    if (this.past) return this.past.now;
    if (board.frozen || this.store.ahead == null || this.disconnected) return Math.max(board.now ?? 0, this.store.heard ?? 0);
    return performance.now() * 1000 + this.store.ahead;
  }

  /** Jupyter marks a widget so whose kernel has ended or was restarted. */
  get disconnected() {
    return Boolean(this.store.cut || this.el.closest(".jupyter-widgets-disconnected"));
  }

  /** Nothing is ready whose kernel has ended. */
  look(row) {
    return lookOf(this.wasEnded && this.store.live && row.status !== "dead" ? { role: "ended" } : row);
  }

  received(now) {
    this.store.cut = false;
    this.store.live = true; // a kernel has spoken: this is no saved page
    this.messageAt = performance.now();
    if (now == null) return;
    this.store.heard = Math.max(this.store.heard ?? 0, now);
    this.store.ahead = Math.max(this.store.ahead ?? -Infinity, now - performance.now() * 1000);
  }

  send(message) {
    try {
      if (!this.disconnected) this.model.send({ ...message, view: this.view });
    } catch {
      this.store.cut = true; // a restart of the kernel closes the way to it, and is not always marked
    }
  }

  act(magic) {
    this.send({ kind: "do", magic });
  }

  draw() {
    const board = this.board;
    this.drawHead(board);
    this.drawFindings(this.past ? [] : this.get("findings"));
    this.drawBenchmark(this.past ? {} : this.get("benchmark"));
    this.drawRows(board);
    this.drawActions();
    this.drawSources(this.past ? [] : this.get("locations"));
    this.drawAnswers(this.get("answers"));
    show(this.notes, board.notes, () => board.notes.map((note) => make("li", {}, note)));
    this.tick();
    this.timeline.touch();
  }

  drawHead(board) {
    const past = this.past && `${formatSpan(this.get("board").now - this.past.now)} ago`;
    show(this.head, [board.headline, past, board.closed, this.wasEnded], () => [
      make("span", { class: "ddpb-title" }, board.headline),
      (board.closed || this.wasEnded) && make("span", { class: "ddpb-category" }, "last known state"),
      past && make("button", { class: "ddpb-small ddpb-past", type: "button", onclick: () => this.timeline.goLive() }, `as it was ${past} · back`),
    ]);
  }

  /** What the user has unfolded stays so when findings change, or vanish for a moment. */
  drawFindings(findings) {
    if (this.findings.firstChild) this.unfolded = this.findings.querySelector("[open]");
    const drawn = show(this.findings, findings, () => findings.map((finding, i) => this.finding(finding, i === 0)));
    if (drawn && this.unfolded) this.findings.querySelector("details")?.setAttribute("open", "");
  }

  finding(finding, first) {
    const remedy = make("div", { class: "ddpb-remedy" }, make("code", {}, finding.remedy), copyButton(finding.remedy, "what to do"));
    for (const magic of finding.magics)
      remedy.append(make("button", { class: "ddpb-small ddpb-run", type: "button", onclick: () => this.act(magic) }, "Run ", make("code", {}, magic)));
    return make(
      first ? "section" : "details",
      { class: `ddpb-finding ddpb-${finding.passing ? "warn" : "bad"}` },
      make(
        first ? "div" : "summary",
        { class: "ddpb-sentence" },
        make("span", { class: "ddpb-mark", "aria-hidden": "true" }, finding.symbol),
        make("b", {}, finding.sentence),
        " ",
        make("span", { class: "ddpb-category" }, finding.passing ? "busy, not stuck" : finding.category),
      ),
      finding.waiting && make("div", { class: "ddpb-waiting" }, finding.waiting),
      make("div", { class: "ddpb-todo" }, "What to do"),
      remedy,
      finding.evidence.length > 0 &&
        make("details", { class: "ddpb-evidence" }, make("summary", {}, `Evidence (${finding.evidence.length})`), make("ul", {}, finding.evidence.map((fact) => make("li", {}, fact)))),
    );
  }

  /** The running benchmark. Its bar stays the same element, so that it moves. */
  drawBenchmark({ what, percent }) {
    show(this.benchmark, what ?? "", () => what && [make("b", {}, `%ddp_bench runs: ${what}`), make("progress", { max: "100", "aria-label": "Benchmark" }), make("span")]);
    if (!what) return;
    this.benchmark.querySelector("progress").value = percent;
    this.benchmark.lastChild.textContent = `${percent} %`;
  }

  // -- rows

  drawRows(board) {
    const dense = board.rows.length > 16;
    this.rows.classList.toggle("ddpb-dense", dense);
    const drawn = show(this.rows, [board.rows, board.left_out, [...this.chosen], this.wasEnded], () => {
      this.ages = [];
      const widest = Math.max(...board.rows.map(({ ranks, count }) => ranks.length + (count > 2 ? 4 : 0)), 1);
      this.rows.style.setProperty("--ddpb-first", `calc(${Math.min(widest, 18)}ch + 26px)`);
      this.wires = make("svg", { class: "ddpb-wires", "aria-hidden": "true" });
      const rows = board.rows.map((row) => this.row(row, this.model.get("stages")));
      const more = board.left_out && make("div", { class: "ddpb-more" }, `and ${nameRanks(board.left_out)}`);
      return [this.wires, ...rows, more];
    });
    if (drawn) requestAnimationFrame(() => this.guarded(() => this.drawWires()));
  }

  row(row, stages) {
    const { mark, word, tone } = this.look(row);
    const ranks = parseRanks(row.ranks);
    const chosen = ranks.every((rank) => this.chosen.has(rank));
    const age = make("span", { class: "ddpb-age" });
    if (row.since_us || row.heard_us) this.ages.push([age, row]);
    const pick = () => {
      ranks.forEach((rank) => (chosen ? this.chosen.delete(rank) : this.chosen.add(rank)));
      this.drawRows(this.board);
      this.drawActions();
      this.rows.querySelector(`[data-first="${row.first}"]`)?.focus();
    };
    const strip = stages.map((stage, i) => {
      const state = i + 1 <= row.stages_passed ? "passed" : i + 1 === row.entering ? (row.gone ? "failed" : "entering") : "to come";
      return make("i", { class: `ddpb-${state.replace(" ", "-")}`, title: `${i + 1} ${stage.name}: ${state}. ${stage.about}` });
    });
    const now = stages[(row.entering || row.stages_passed) - 1]?.name ?? "not launched";
    return make(
      "div",
      { class: `ddpb-row ddpb-${tone}`, role: "listitem", title: row.process },
      make(
        "button",
        { class: "ddpb-ranks", type: "button", "data-first": row.first, "aria-pressed": String(chosen), title: "Choose for Step, Where and Restart", "aria-label": `Choose ${nameRanks(row.ranks)}`, onclick: pick },
        row.ranks,
        row.count > 2 && make("small", {}, ` ×${row.count}`),
      ),
      make("span", { class: "ddpb-chip" }, make("span", { class: "ddpb-mark", "aria-hidden": "true" }, mark), word),
      make("span", { class: "ddpb-strip", role: "img", "aria-label": `stage ${row.stages_passed} of ${stages.length}: ${now}` }, strip),
      make("span", { class: "ddpb-doing" }, row.text || (row.entering ? now : "")),
      make("span", { class: "ddpb-for" }, row.waits_for && `waits for ${nameRanks(row.waits_for)}`),
      age,
    );
  }

  /** Brackets from those that wait to those they wait for. */
  drawWires() {
    const rows = [...this.rows.querySelectorAll(".ddpb-row")];
    const waits = brackets(this.board.rows).slice(0, 4);
    this.rows.style.setProperty("--ddpb-gutter", waits.length ? `${10 + 7 * waits.length}px` : "0px");
    const middle = (row) => rows[row].offsetTop + rows[row].offsetHeight / 2;
    const edge = 8 + 7 * waits.length;
    const paths = waits.flatMap(({ from, to }, i) => {
      const x = edge - 7 * (i + 1);
      const ends = [...from, ...to].map(middle);
      const line = `M${x} ${Math.min(...ends)}V${Math.max(...ends)}`;
      const stubs = from.map((row) => `M${x} ${middle(row)}H${edge}`).join("");
      const heads = to.map((row) => `M${x} ${middle(row)}H${edge}m-5 -4l5 4l-5 4`).join("");
      return [make("path", { d: line + stubs }), make("path", { class: "ddpb-head-of", d: heads })];
    });
    this.wires.setAttribute("height", this.rows.scrollHeight);
    this.wires.replaceChildren(...paths);
  }

  /** torch is being loaded. Its bar stays the same element, so that it moves. */
  drawLoading(loading, now) {
    this.loading.hidden = !loading;
    if (!loading) return;
    const bar = this.loading.firstChild ?? make("progress", { max: "100", "aria-label": "Loading torch" });
    if (!bar.parentNode) this.loading.append(bar, make("span"));
    if (loading.percent) bar.value = loading.percent;
    const share = loading.percent ? `about ${loading.percent} %, ` : "";
    this.loading.lastChild.textContent = `Loading torch, once for all ranks: ${share}${formatAge(now - loading.since_us)}`;
  }

  /** What changes by itself: ages, and whether a kernel is there. */
  tick() {
    const now = this.now();
    const [time, frozen] = [performance.now(), this.get("board").frozen];
    const ended = this.disconnected;
    if (document.hidden || time - this.tickAt > SLEPT_MS) [this.messageAt, this.hereAt] = [time, -Infinity];
    this.tickAt = time;
    const quietMs = time - this.messageAt;
    if (!frozen && !ended && !document.hidden && time - this.hereAt > (quietMs > ASK_AFTER_MS ? ASK_AFTER_MS : HERE_EVERY_MS)) {
      this.hereAt = time;
      this.send({ kind: "here" });
    }
    const lost = !frozen && !ended && quietMs > LOST_AFTER_MS;
    this.el.classList.toggle("ddpb-lost", lost);
    this.el.classList.toggle("ddpb-ended", ended);
    const why = ended ? (this.store.live ? ENDED : SAVED) : lost ? `The kernel has not responded for ${formatAge(quietMs * 1000)}. This is the last known state.` : "";
    if (this.gone.textContent !== why) this.gone.textContent = why;
    if (ended !== this.wasEnded) {
      this.wasEnded = ended;
      this.drawHead(this.board);
      this.drawRows(this.board);
      this.timeline.touch();
    }
    this.drawLoading(this.board.loading, now);
    for (const [element, { heard_us, since_us }] of this.ages ?? []) {
      const text = heard_us ? `silent ${formatAge(now - heard_us)}` : formatAge(Math.max(0, now - since_us));
      if (element.textContent !== text) element.textContent = text;
    }
  }

  // -- actions

  drawActions() {
    const actions = this.past ? [] : this.get("actions");
    const busy = this.get("busy");
    const key = [actions, busy, [...this.chosen]];
    const focused = this.actions.contains(document.activeElement) && document.activeElement.dataset.name;
    show(this.actions, key, () => [
      ...actions.map((action) => this.action(action, busy)),
      actions.length > 0 &&
        make(
          "span",
          { class: "ddpb-chosen" },
          this.chosen.size ? `for ${nameRanks(formatRanks(this.chosen))} ` : "for all ranks",
          this.chosen.size > 0 && make("button", { class: "ddpb-small", type: "button", onclick: () => this.choose([]) }, "all"),
        ),
    ]);
    if (focused) this.actions.querySelector(`[data-name="${focused}"]`)?.focus();
  }

  choose(ranks) {
    this.chosen = new Set(ranks);
    this.drawRows(this.board);
    this.drawActions();
  }

  action(action, busy) {
    const magic = magicFor(action, this.chosen);
    const enough = action.name === "restart" && this.chosen.size > 0;
    const working = busy.includes(magic);
    const whyNot = working ? "running" : enough ? "" : action.why_not;
    return make(
      "button",
      {
        class: "ddpb-action",
        type: "button",
        "data-name": action.name,
        "aria-disabled": String(Boolean(whyNot)),
        title: whyNot ? `${magic}: ${whyNot}` : magic,
        onclick: () => whyNot || this.act(magic),
      },
      make("span", {}, working ? `${action.label} …` : action.label),
      make("code", {}, magic),
    );
  }

  // -- source and answers

  drawSources(locations) {
    show(this.sources, locations, () =>
      locations.map((location) =>
        make(
          "figure",
          { class: "ddpb-source" },
          make("figcaption", {}, make("b", {}, nameRanks(location.ranks)), ` at ${location.call_site}`),
          location.callers.length > 0 && make("div", { class: "ddpb-callers" }, `from ${location.callers.join(" → ")}`),
          make(
            "pre",
            {},
            location.lines.map(([number, text]) =>
              make("div", { class: number === location.line ? "ddpb-here" : "" }, `${number === location.line ? "▸" : " "}${String(number).padStart(4)}  ${text}`),
            ),
          ),
        ),
      ),
    );
  }

  drawAnswers(answers) {
    show(this.answers, answers, () =>
      answers.map((answer, i) =>
        make(
          "details",
          { class: `ddpb-answer${answer.ok ? "" : " ddpb-bad"}`, open: i === 0 },
          make("summary", {}, make("code", {}, answer.magic), answer.ok ? "" : " did not work"),
          make("pre", {}, answer.text),
        ),
      ),
    );
  }
}

// ---- the timeline

/** The pattern that marks a wait, whatever the colours. */
function hatch(colour) {
  const tile = new OffscreenCanvas(6, 6);
  const brush = tile.getContext("2d");
  brush.globalAlpha = 0.28;
  brush.fillStyle = brush.strokeStyle = colour;
  brush.fillRect(0, 0, 6, 6);
  brush.globalAlpha = 1;
  brush.lineWidth = 1.4;
  for (const shift of [-6, 0, 6]) {
    brush.moveTo(shift, 6);
    brush.lineTo(shift + 6, 0);
  }
  brush.stroke();
  return tile;
}

const TONES = { all_reduce: "a", broadcast: "b", barrier: "c" };

class Timeline {
  constructor(page) {
    this.page = page;
    this.window = new Window();
    this.at = null;
    this.now = 0; // when it was drawn last
    this.canvas = make("canvas", {
      tabindex: "0",
      role: "img",
      "aria-label": "Timeline of collectives. Arrow keys go from one to the next; plus and minus zoom.",
      onpointermove: (e) => this.move(e),
      onpointerleave: () => this.point(null),
      onpointerdown: (e) => this.grab(e),
      onlostpointercapture: () => (this.grabbed = null), // released, or taken over by a scroll
      ondblclick: () => this.fit(),
      onkeydown: (e) => this.key(e),
    });
    this.canvas.addEventListener("wheel", (e) => this.wheel(e), { passive: false });
    this.tip = make("div", { class: "ddpb-tip", role: "status", hidden: true });
    this.frameAt = make("div", { class: "ddpb-at", hidden: true });
    this.pause = this.button("Pause", () => (this.window.follow ? this.hold() : this.goLive()));
    this.slider = make("input", { type: "range", min: "0", max: "1000", value: "1000", "aria-label": "Time, scrub back", oninput: () => this.scrub() });
    this.info = make("span", { class: "ddpb-info" });
    const legend = [["a", "communicates"], ["wait", "waits for others"], ["last", "last to arrive"], ["fail", "failed"], ["pause", "paused (held by you)"], ["free", "freed, nobody waits any more"]];
    this.el = make(
      "section",
      { class: "ddpb-timeline", "aria-label": "Collectives", hidden: true },
      make(
        "div",
        { class: "ddpb-bar" },
        make("b", {}, "Collectives"),
        this.pause,
        this.button("−", () => this.zoom(1.6), "Zoom out"),
        this.button("+", () => this.zoom(1 / 1.6), "Zoom in"),
        this.button("All", () => this.fit(), "Show the whole run"),
        this.slider,
        this.info,
      ),
      make("div", { class: "ddpb-canvas" }, this.canvas, this.frameAt, this.tip),
      make("div", { class: "ddpb-legend" }, legend.map(([name, text]) => make("span", {}, make("i", { class: `ddpb-key-${name}`, "aria-hidden": "true" }), text))),
    );
  }

  button(text, act, label = null) {
    return make("button", { class: "ddpb-small", type: "button", "aria-label": label, title: label, onclick: act }, text);
  }

  /** Have it drawn in the page's next frame. */
  touch() {
    this.asked ??= requestAnimationFrame(() => {
      this.asked = null;
      this.page.guarded(() => this.frame());
    });
  }

  zoom(factor, at) {
    this.window.zoom(factor, at);
    this.touch();
  }

  fit() {
    this.window.fit(this.page.store, this.page.now());
    this.touch();
  }

  hold() {
    this.window.follow = false;
    this.touch();
  }

  goLive() {
    this.window.follow = true;
    this.window.set = false;
    this.slider.value = 1000;
    this.page.past = null;
    this.page.draw();
  }

  /** Scrub back: the window goes there, and the rows show what was known then. */
  scrub() {
    const { store } = this.page;
    const { now: end = store.last, began = store.first } = this.page.get("board");
    const at = began + (Number(this.slider.value) / 1000) * (Math.max(end, store.last) - began);
    this.window.centre(at);
    this.touch();
    clearTimeout(this.asking);
    this.asking = setTimeout(() => this.page.send({ kind: "at", at: Math.round(at) }), 120);
  }

  // -- pointing

  wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
    event.preventDefault();
    this.zoom(Math.exp(event.deltaY / 300), this.shareOf(event));
  }

  grab(event) {
    this.grabbed = { x: event.clientX, from: this.window.from };
    this.canvas.setPointerCapture(event.pointerId);
  }

  shareOf(event) {
    const box = this.canvas.getBoundingClientRect();
    return Math.min(1, Math.max(0, (event.clientX - box.left - this.gutter) / (box.width - this.gutter)));
  }

  move(event) {
    if (this.grabbed) {
      const { x, from } = this.grabbed;
      if (Math.abs(x - event.clientX) <= 2) return;
      this.window.pan((from - this.window.from) / this.window.span + (x - event.clientX) / (this.width - this.gutter));
      this.touch();
      return;
    }
    const box = this.canvas.getBoundingClientRect();
    this.point(this.find(event.clientX - box.left, event.clientY - box.top));
  }

  /** The slice at a point of the canvas, or next to it. */
  find(x, y) {
    let [nearest, near] = [null, 3];
    const rank = Math.floor(y / this.rowHeight);
    this.layOut(this.shown[this.lineOf(rank)] ?? rank, (slice, x0, x1, top, tall) => {
      const off = Math.max(x0 - x, x - x1, top - y, y - top - tall, 0);
      if (off <= near) [nearest, near] = [slice, off];
    });
    return nearest;
  }

  /** A frame around what is pointed at, and words below it: the canvas stays as it is. */
  point(slice) {
    if (slice === this.at) return;
    this.at = slice;
    this.tip.hidden = !slice;
    if (slice) this.tip.replaceChildren(...this.page.store.describe(slice, this.page.now()).map((line) => make("div", {}, line)));
    this.drawPointed();
  }

  drawPointed() {
    const slice = this.at;
    const until = slice && endOf(slice, this.now);
    this.frameAt.hidden = !slice || until < this.window.from || cameAt(slice) > this.window.to;
    if (!slice) return;
    let [above, tall] = this.rowOf(slice[RANK]);
    this.layOut(slice[RANK], (each, _, __, top, high) => each === slice && ([above, tall] = [top, high]));
    const inside = (x) => Math.max(this.gutter, Math.min(x, this.width));
    const [x0, x1] = [inside(this.x(cameAt(slice))), inside(this.x(until))];
    this.frameAt.style.cssText = `left: ${x0}px; top: ${above}px; width: ${Math.max(x1 - x0, 3)}px; height: ${Math.max(tall, 3)}px`;
    this.tip.style.cssText = `left: ${Math.max(0, Math.min(x0, this.width - 320))}px; top: ${(slice[RANK] + 1) * this.rowHeight + 4}px`;
  }

  key(event) {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const { store } = this.page;
    if (steps[event.key]) {
      const [down, along] = steps[event.key];
      const rank = this.at ? this.at[RANK] + down : 0;
      const list = store.rows.get(rank)?.list;
      if (list?.length) {
        const here = this.at ? (down ? store.startOf(list, this.at[ISSUED]) + 1 : list.indexOf(this.at) + along) : list.length - 1;
        const next = list[Math.max(0, Math.min(list.length - 1, here))];
        this.point(next);
        if (next[ISSUED] < this.window.from || next[ISSUED] > this.window.to) this.window.centre(next[ISSUED]);
      }
    } else if (event.key === "+" || event.key === "=") this.zoom(1 / 1.6);
    else if (event.key === "-") this.zoom(1.6);
    else if (event.key === "Home") this.fit();
    else if (event.key === "End") this.goLive();
    else if (event.key === "Escape") this.point(null);
    else return;
    event.preventDefault();
    event.stopPropagation();
    this.touch();
  }

  // -- drawing

  x(at) {
    return this.gutter + ((at - this.window.from) / this.window.span) * (this.width - this.gutter);
  }

  /** Where a rank is drawn: its top and its height. */
  rowOf(rank) {
    const apart = this.rowHeight > 5 ? 1 : 0;
    return [rank * this.rowHeight + apart, this.rowHeight - 2 * apart];
  }

  /** The first line of the screen's pixels that a rank is on. */
  lineOf(rank) {
    return Math.floor(rank * this.rowHeight * this.ratio);
  }

  /** Where a rank's visible slices are drawn: `place(slice, x0, x1, top, tall)`. */
  layOut(rank, place) {
    const [above, high] = this.rowOf(rank);
    const seen = this.page.store.seen(rank, this.window.from, this.window.to);
    layOut(seen, (at) => this.x(at), this.now, high >= 10, (slice, x0, x1, top, tall) => place(slice, x0, x1, above + top * high, tall * high));
  }

  /** Draw it, if it can be seen, and again while time alone changes it. */
  frame() {
    const { store, el } = this.page;
    if (!el.offsetParent) return; // hidden; a ResizeObserver reports when that changes
    this.el.hidden = !store.rows.size;
    if (this.el.hidden) return;
    const { frozen } = this.page.get("board");
    this.now = this.page.now();
    const flows = this.window.update(store, this.now);
    this.drawCanvas();
    // What was pointed at may have moved, or have been dropped.
    if (this.at && store.rows.get(this.at[RANK])?.at.get(this.at[NUMBER]) !== this.at) this.point(null);
    else this.drawPointed();
    const text = this.window.follow ? "Pause" : frozen ? "▶ End" : "▶ Live";
    if (this.pause.textContent !== text) this.pause.textContent = text;
    const skipped = store.skipped ? ` · ${store.skipped.toLocaleString()} not shown` : "";
    this.info.textContent = `${formatSpan(this.window.span)} shown${skipped}`;
    clearTimeout(this.later);
    if (flows && !frozen) this.later = setTimeout(() => this.touch(), 100);
  }

  /** The colours of the page's theme: for a brush, and in `words` as pixels have them. */
  theme(brush) {
    const style = getComputedStyle(this.el);
    const names = ["ink", "line", "bad", "warn", "busy", "ok", "paused", "idle", "a", "b", "c", "d", "paper"];
    const colours = Object.fromEntries(names.map((each) => [each, style.getPropertyValue(`--ddpb-${each}`).trim() || "gray"]));
    const key = Object.values(colours).join() + style.fontFamily;
    if (this.colours?.key === key) return this.colours;
    const pixel = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const word = (colour) => {
      pixel.fillStyle = colour;
      pixel.fillRect(0, 0, 1, 1);
      return new Uint32Array(pixel.getImageData(0, 0, 1, 1).data.buffer)[0];
    };
    // Lines too thin for a pattern have its mean colour.
    const words = { wait: word(`color-mix(in srgb, ${colours.warn} 55%, ${colours.paper})`) };
    for (const name of ["paused", "bad", "idle", "a", "b", "c", "d"]) words[name] = word(colours[name]);
    return (this.colours = { ...colours, key, words, wait: brush.createPattern(hatch(colours.warn), "repeat"), font: style.fontFamily });
  }

  drawCanvas() {
    const size = this.page.get("board").world_size;
    const ratio = (this.ratio = window.devicePixelRatio || 1);
    this.shown = [];
    this.rowHeight = rowHeight(size);
    this.width = Math.max(200, this.canvas.parentElement.clientWidth);
    this.gutter = this.width < 500 ? 26 : 36;
    const bottom = Math.ceil(this.rowHeight * size);
    const [wide, high] = [Math.round(this.width * ratio), Math.round((bottom + 18) * ratio)];
    if (this.canvas.width !== wide || this.canvas.height !== high) {
      [this.canvas.width, this.canvas.height] = [wide, high];
      this.canvas.style.height = `${bottom + 18}px`;
    }
    const brush = this.canvas.getContext("2d");
    brush.setTransform(ratio, 0, 0, ratio, 0, 0);
    brush.clearRect(0, 0, this.width, bottom + 18);
    const colours = this.theme(brush);
    const rows = this.boardRows();
    brush.font = `11px ${colours.font}`;
    brush.save();
    brush.beginPath();
    brush.rect(this.gutter, 0, this.width - this.gutter, bottom);
    brush.clip();
    if (this.rowHeight > 2) this.drawRows(brush, colours, size);
    else this.drawLines(brush, colours, size, rows);
    this.drawMarks(brush, colours);
    brush.restore();
    this.drawAxis(brush, colours, bottom);
    this.drawLabels(brush, colours, size, rows);
  }

  drawRows(brush, colours, size) {
    brush.strokeStyle = colours.paused;
    brush.setLineDash([3, 2]);
    const fill = (name, x0, x1, top, tall) => {
      if (name === "paused") return brush.strokeRect(x0 + 0.5, top + 0.5, x1 - x0 - 1, tall - 1);
      brush.fillStyle = colours[name];
      brush.fillRect(x0, top, x1 - x0, tall);
    };
    for (let rank = 0; rank < size; rank++) {
      this.layOut(rank, (slice, x0, x1, top, tall) => {
        const from = this.drawSlice(fill, slice, x0, x1, top, tall);
        this.drawWords(brush, colours, slice, from, x1, top, tall);
      });
    }
    brush.setLineDash([]);
  }

  /**
   * Ranks of about a pixel, written as pixels: much less work than rectangles for a thousand ranks.
   * Of ranks that share a line the one in the smallest row of the board is drawn: the exception.
   */
  drawLines(brush, colours, size, rows) {
    const { ratio } = this;
    const left = Math.round(this.gutter * ratio);
    const [wide, high] = [this.canvas.width - left, Math.ceil(size * this.rowHeight * ratio)];
    if (this.image?.width !== wide || this.image.height !== high) this.image = new ImageData(wide, high);
    const pixels = new Uint32Array(this.image.data.buffer).fill(0);
    let [line, end] = [-1, -1];
    const inside = (x) => Math.max(0, Math.min(Math.round(x * ratio) - left, wide));
    const fill = (name, x0, x1) => {
      const [from, to] = [inside(x0), inside(Math.max(x1, x0 + 1 / ratio))];
      for (let y = line; y < end; y++) pixels.fill(colours.words[name], y * wide + from, y * wide + to);
    };
    const countOf = (rank) => rows.get(rank)?.count ?? Infinity;
    for (let rank = 0, next = 0; rank < size; rank = next) {
      line = this.lineOf(rank);
      let rarest = rank;
      while (++next < size && this.lineOf(next) === line) if (countOf(next) < countOf(rarest)) rarest = next;
      end = Math.max(line + 1, this.lineOf(next));
      this.shown[line] = rarest;
      this.layOut(rarest, (slice, x0, x1) => this.drawSlice(fill, slice, x0, x1));
    }
    brush.putImageData(this.image, left, 0);
  }

  /** Below what is there. */
  drawAxis(brush, colours, bottom) {
    brush.globalCompositeOperation = "destination-over";
    brush.textBaseline = "alphabetic";
    brush.textAlign = "center";
    const origin = Number.isFinite(this.page.store.first) ? this.page.store.first : 0;
    const times = ticks(this.window.from - origin, this.window.to - origin, this.width < 500 ? 3 : 6);
    for (const at of times) {
      const x = Math.round(this.x(at + origin)) + 0.5;
      if (x < this.gutter) continue;
      brush.fillStyle = colours.line;
      brush.fillRect(x, 0, 1, bottom + 3);
      brush.fillStyle = colours.ink;
      const text = formatTick(at, times[1] - times[0] || at);
      if (x > this.gutter + 18 && x < this.width - 18) brush.fillText(text, x, bottom + 14);
    }
    brush.globalCompositeOperation = "source-over";
  }

  /** The board's row of each rank. */
  boardRows() {
    const { rows } = this.page.board;
    if (this.byRank?.rows !== rows) {
      const pairs = rows.flatMap((row) => parseRanks(row.ranks).map((rank) => [rank, row]));
      this.byRank = { rows, of: new Map(pairs) };
    }
    return this.byRank.of;
  }

  drawLabels(brush, colours, size, rows) {
    const step = 2 ** Math.ceil(Math.log2(Math.max(1, 11 / this.rowHeight)));
    brush.textAlign = "right";
    brush.textBaseline = "middle";
    const middle = (rank) => rank * this.rowHeight + Math.max(this.rowHeight, 10) / 2;
    const apart = this.rowHeight > 2 ? 1 : 0; // thinner ranks of a row make one bar
    let began = 0;
    for (let rank = 1; rank <= size; rank++) {
      const row = rows.get(began);
      if (!apart && rank < size && rows.get(rank) === row) continue;
      brush.fillStyle = colours[row && this.page.look(row).tone] ?? colours.idle;
      brush.fillRect(this.gutter - 5, began * this.rowHeight, 3, Math.max((rank - began) * this.rowHeight - apart, 0.6));
      began = rank;
    }
    brush.fillStyle = colours.ink;
    for (let rank = 0; rank < size; rank += step) brush.fillText(String(rank), this.gutter - 8, middle(rank));
    if (step === 1) return;
    // Where there is no room for all numbers, those of ranks in trouble stand above the others.
    const troubled = [...rows.keys()].filter((rank) => ["culprit", "late", "dead", "failed"].includes(rows.get(rank).role));
    for (const rank of troubled.slice(0, 12)) {
      brush.fillStyle = colours[this.page.look(rows.get(rank)).tone];
      brush.fillRect(0, middle(rank) - 7, this.gutter - 5, 14);
      brush.fillStyle = colours.paper;
      brush.fillText(String(rank), this.gutter - 8, middle(rank));
    }
  }

  /** A slice, by `fill(colour's name, x0, x1, top, tall)`; where its last part begins. */
  drawSlice(fill, slice, x0, x1, top, tall) {
    const phase = PHASES[slice[PHASE]];
    const kind = this.page.store.kinds[slice[KIND]];
    const collective = slice[COLLECTIVE];
    let from = x0;
    if (slice[HELD]) {
      from = x0 = Math.min(x1, this.x(slice[ISSUED]));
      fill("paused", this.x(cameAt(slice)), x0, top, tall);
    }
    if (phase === "paused") fill("paused", x0, x1, top, tall);
    else if (phase === "issued") fill("wait", x0, x1, top, tall);
    else if (phase === "done") {
      if (collective?.size > 1 && this.x(collective.last) > x0 + 1) from = Math.min(this.x(collective.last), x1);
      if (from > x0) fill("wait", x0, from, top, tall);
      fill(TONES[kind?.[OPERATION]] ?? "d", from, Math.max(x1, from + 1.5), top, tall);
    } else if (phase === "freed") fill("idle", x0, Math.max(x1, x0 + 3), top + tall / 3, tall / 3);
    else fill("bad", x0, Math.max(x1, x0 + 3), top, tall);
    return from;
  }

  /** Arrow heads at the last to arrive: on top, so that one rank of a thousand is seen. */
  drawMarks(brush, colours) {
    for (const { size, first, last, lastRank } of this.page.store.collectives.values()) {
      if (size < 2 || last < this.window.from || last > this.window.to || last - first < 0.02 * this.window.span) continue;
      const [x, y] = [this.x(last), (lastRank + 0.5) * this.rowHeight];
      brush.beginPath();
      brush.moveTo(x, y);
      brush.lineTo(x - 8, y - 5);
      brush.lineTo(x - 8, y + 5);
      brush.closePath();
      brush.fillStyle = colours.bad;
      brush.fill();
      brush.strokeStyle = colours.paper;
      brush.stroke();
    }
  }

  drawWords(brush, colours, slice, x0, x1, top, tall) {
    const [left, right] = [Math.max(x0, this.gutter), Math.min(x1, this.width)];
    const kind = this.page.store.kinds[slice[KIND]];
    if (!kind || tall < 10 || right - left < 40) return;
    const text = ({ paused: "‖ ", issued: "… ", done: "", freed: "■ " }[PHASES[slice[PHASE]]] ?? "✗ ") + kind[OPERATION];
    brush.textAlign = "left";
    brush.textBaseline = "middle";
    const room = right - left - 8;
    const fits = [`${text} bucket ${kind[BUCKET]}`, text].slice(kind[BUCKET] ? 0 : 1).find((each) => brush.measureText(each).width <= room);
    if (!fits) return;
    const bare = isOpen(slice) || PHASES[slice[PHASE]] === "freed";
    if (bare) {
      brush.fillStyle = colours.paper;
      brush.fillRect(left + 2, top + 2, brush.measureText(fits).width + 5, tall - 4);
    }
    brush.fillStyle = bare ? colours.ink : "#fff";
    brush.fillText(fits, left + 4, top + tall / 2 + 0.5);
  }
}

// ---- the entry

/** Run `act`; an error is shown, and the picture without scripts comes back. */
function guarded(el, page, act) {
  try {
    act();
  } catch (error) {
    page?.el.remove();
    console.error(error);
    el.replaceChildren(
      make("div", { class: "ddpb ddpb-broken", role: "alert" }, `The live board does not work here; below is the board as it was when this cell ended. Now: %ddp_status. ${error?.name ?? ""}: ${error?.message ?? error}`),
    );
    return false;
  }
  return true;
}

export default () => {
  const store = new Store(); // of one model, shared by its views
  const pages = new Set();

  function receive(model, message) {
    if (message.kind === "state") Object.assign((store.state ??= {}), message.values);
    if (message.kind === "slices") {
      store.resize((store.state?.board ?? model.get("board")).world_size);
      if (!store.take(message)) pages.values().next().value?.send({ kind: "hello" });
    }
    for (const page of pages) {
      page.received(message.now);
      if (message.kind === "state") page.draw();
      if (message.kind === "past" && message.view === page.view && !page.timeline.window.follow) {
        page.past = message.board;
        page.draw();
      }
      page.timeline.touch();
    }
  }

  return {
    initialize({ model }) {
      model.on("msg:custom", (message) => receive(model, message));
    },

    render({ model, el }) {
      let page = null;
      let alive = true;
      const names = ["board", "findings", "locations", "actions", "benchmark", "busy", "answers"];
      const guard = (act) => alive && (alive = guarded(el, page, act));
      const draw = () => guard(() => {
        page.received(model.get("board").now);
        page.draw();
      });
      guard(() => {
        page = new Page(model, store, guard);
        store.resize(model.get("board").world_size);
        pages.add(page);
        el.replaceChildren(page.el);
        page.draw();
        names.forEach((name) => model.on(`change:${name}`, draw));
        page.send({ kind: "hello" });
      });
      const clock = setInterval(() => guard(() => page.tick()), 1000);
      // Also when it becomes visible after it was hidden.
      const sized = new ResizeObserver(() => guard(() => {
        page.timeline.touch();
        page.drawWires();
      }));
      if (page) sized.observe(page.el);
      return () => {
        alive = false;
        clearInterval(clock);
        sized.disconnect();
        names.forEach((name) => model.off(`change:${name}`, draw));
        pages.delete(page);
      };
    },
  };
};
