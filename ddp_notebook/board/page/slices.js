// The collectives of a run as slices of time: their store, where they are drawn, the part shown.

const [RANK, NUMBER, KIND, SEQ_ID, ISSUED, DONE, PHASE, HELD, STEP] = [0, 1, 2, 3, 4, 5, 6, 7, 8];
const COLLECTIVE = 9; // added here: what it shares with the slices of the other ranks
const [OPERATION, API, PART, BUCKET, GROUP, DTYPE, SHAPE, BYTES, REDUCE, PEER, CALL_SITE, CODE, LABEL, RUN] =
  Array(14).keys();
export const PHASES = ["paused", "issued", "done", "failed", "refused", "freed", "paused"]; // last: at a line
const MOST_SLICES = 40_000;
const MOST_PER_RANK = 2_000;
const MOST_COLLECTIVES = 20_000;

/** The slices of the session's runs, as many as fit: the oldest of each rank go first. */
export class Store {
  constructor(worldSize = 1) {
    this.resize(worldSize);
    this.generation = -1;
    this.told = this.latest = 0; // the last change that is known with all before it, and the last there is
    this.forget();
  }

  resize(worldSize) {
    this.perRank = Math.max(8, Math.min(MOST_PER_RANK, Math.floor(MOST_SLICES / Math.max(1, worldSize))));
  }

  /** Note the number that a message has. It is a change itself if `taken`; the `whole` has all before it. */
  count(told, taken, whole = false) {
    this.latest = Math.max(this.latest, told);
    if (taken && (whole || told === this.told + 1)) this.told = told;
  }

  /** Changes were lost on the way: all must be requested. */
  get missed() {
    return this.told < this.latest;
  }

  forget() {
    this.kinds = [];
    this.rows = new Map();
    this.collectives = new Map();
    this.begun = new Map(); // when each run issued its first
    this.titles = new Map(); // what each run is called
    this.skipped = 0;
    this.first = Infinity;
    this.last = 0; // of what ended by itself: what waited until it was freed must not squeeze the rest
    this.end = 0;
    this.pending = 0;
    this.cuts = [];
  }

  /** Add a message; false if what it continues is not known. */
  take(message) {
    if (message.generation !== this.generation) {
      this.forget();
      this.generation = message.generation;
    }
    if (message.first_kind > this.kinds.length) return false;
    this.run = message.run;
    message.kinds.forEach((kind, i) => (this.kinds[message.first_kind + i] = kind));
    for (const [run, title] of message.titles ?? []) this.titles.set(run, title);
    message.slices.forEach((slice) => this.add(slice));
    let before = 0;
    this.cuts = (message.cuts ?? []).map(([from, to]) => ({ from, to, before: (before += to - from) - to + from }));
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
      row.list.push(slice);
      if (row.list.at(-2)?.[ISSUED] > slice[ISSUED]) row.list.sort((a, b) => a[ISSUED] - b[ISSUED]);
      if (isOpen(slice)) this.pending++;
      if (row.list.length > this.perRank * 1.25) this.trim(row);
    }
    this.join(slice);
    const run = this.kinds[slice[KIND]]?.[RUN];
    if (slice[ISSUED]) this.begun.set(run, Math.min(this.begun.get(run) ?? Infinity, calledAt(slice)));
    if (slice[ISSUED]) this.first = Math.min(this.first, calledAt(slice));
    this.end = Math.max(this.end, slice[ISSUED], slice[DONE]);
    this.last = Math.max(this.last, slice[ISSUED], PHASES[slice[PHASE]] === "freed" ? 0 : slice[DONE]);
  }

  trim(row) {
    for (const gone of row.list.splice(0, row.list.length - this.perRank)) {
      row.at.delete(gone[NUMBER]);
      if (isOpen(gone)) this.pending--;
    }
    this.first = Infinity;
    for (const { list } of this.rows.values()) this.first = Math.min(this.first, calledAt(list[0]));
  }

  /** One collective of several ranks: when the last issued it, and which; known once it is `over`. */
  join(slice) {
    const kind = this.kinds[slice[KIND]];
    if (!kind || kind[PEER] >= 0 || ["paused", "refused", "freed"].includes(PHASES[slice[PHASE]])) return;
    const key = `${kind[RUN]}/${kind[GROUP]}/${slice[SEQ_ID]}`;
    let collective = this.collectives.get(key);
    if (!collective) this.collectives.set(key, (collective = { size: 0, last: -Infinity, first: Infinity }));
    if (slice[COLLECTIVE] !== collective) collective.size++;
    slice[COLLECTIVE] = collective;
    collective.first = Math.min(collective.first, slice[ISSUED]);
    if (slice[ISSUED] > collective.last) [collective.last, collective.lastRank] = [slice[ISSUED], slice[RANK]];
    collective.over ||= PHASES[slice[PHASE]] === "done";
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

  /** The first slice of a rank's newest run among its last `most`; of an older run where it has none. */
  newest(list, most) {
    const run = this.kinds[list.at(-1)[KIND]]?.[RUN];
    let first = list.length - 1;
    while (first > Math.max(0, list.length - most) && this.kinds[list[first - 1][KIND]]?.[RUN] === run) first--;
    return [list[first], run];
  }

  /** When a run began and ended, as far as it is kept. */
  spanOf(run) {
    let [from, to, open] = [Infinity, 0, false];
    for (const { list } of this.rows.values())
      for (const slice of list) {
        if (this.kinds[slice[KIND]]?.[RUN] !== run) continue;
        from = Math.min(from, calledAt(slice));
        to = Math.max(to, slice[ISSUED], slice[DONE]);
        open ||= isOpen(slice);
      }
    return [from, to, open];
  }

  /** The run of the slice nearest to a time. */
  runAt(at) {
    let [run, near] = [null, Infinity];
    for (const { list } of this.rows.values()) {
      const start = this.startOf(list, at);
      for (const slice of list.slice(start, start + 3)) {
        const off = Math.abs(slice[ISSUED] - at);
        if (off < near) [run, near] = [this.kinds[slice[KIND]]?.[RUN], off];
      }
    }
    return run;
  }

  /** A time as the axis has it: without the pauses before it. */
  axis(at) {
    const cut = this.cuts.findLast(({ from }) => from < at);
    return cut ? at - cut.before - Math.min(at, cut.to) + cut.from : at;
  }

  /** The inverse of `axis`. */
  timeOf(place) {
    const cut = this.cuts.findLast(({ from, before }) => from - before < place);
    return cut ? place + cut.before + cut.to - cut.from : place;
  }

  /** The steps that a row begins in a part of the axis: which, counted from 0, and where. */
  steps(rank, from, to) {
    const seen = this.seen(rank, this.timeOf(from), this.timeOf(to)).filter((each) => each[STEP]);
    const begun = seen.filter((each, i) => (i ? each[STEP] !== seen[i - 1][STEP] : each[STEP] === 1));
    return begun.map((each) => [each[STEP] - 1, this.axis(calledAt(each))]);
  }

  /** What of a rank's row reaches into a part of time. */
  seen(rank, from, to) {
    const list = this.rows.get(rank)?.list ?? [];
    const start = this.startOf(list, from);
    let end = start;
    while (end < list.length && calledAt(list[end]) <= to) end++;
    return list.slice(start, end);
  }

  /** A slice in words, line by line. */
  describe(slice, now) {
    const kind = this.kinds[slice[KIND]];
    if (!kind) return [];
    const phase = PHASES[slice[PHASE]];
    const reduce = kind[REDUCE] && kind[REDUCE] !== "SUM" ? `(${kind[REDUCE]})` : "";
    const lines = [`rank ${slice[RANK]} · ${kind[OPERATION]}${reduce} · ${phase} · #${slice[SEQ_ID]}`];
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
    if (!collective?.over) return lines;
    if (collective.last > slice[ISSUED])
      lines[lines.length - 1] += ` · waited ${formatSpan(collective.last - slice[ISSUED])} for rank ${collective.lastRank}`;
    else if (collective.lastRank === slice[RANK] && collective.last > collective.first)
      lines[lines.length - 1] += ` · last to arrive, ${formatSpan(collective.last - collective.first)} after the first`;
    return lines;
  }
}

const isOpen = (slice) => slice[PHASE] < 2;
/** When the rank called it; if it was paused, it was issued later. */
const calledAt = (slice) => slice[ISSUED] - (slice[HELD] || 0);
const endOf = (slice, now) => (isOpen(slice) ? now : slice[DONE] || slice[ISSUED]);

/** Whether a slice was issued well before `until`; the end of the one before is recorded a bit late. */
const within = (slice, until, now) => slice[ISSUED] + 0.2 * (endOf(slice, now) - slice[ISSUED]) < until;

/** What slices are in sum, by operation: how many, how long, and who was waited for. */
export function sums(slices, store, now) {
  const of = new Map();
  for (const slice of slices) {
    const name = store.kinds[slice[KIND]]?.[OPERATION];
    if (!name || slice[NUMBER] < 0) continue;
    const all = of.get(name) ?? { took: 0, count: 0, met: new Set(), waited: new Map() };
    of.set(name, all);
    const { over, last, lastRank } = slice[COLLECTIVE] ?? {};
    const spent = (until) => store.axis(until) - store.axis(slice[ISSUED]);
    const took = spent(endOf(slice, now));
    all.took += took;
    all.count++;
    all.met.add(slice[COLLECTIVE] ?? slice);
    if (over && last > slice[ISSUED]) all.waited.set(lastRank, (all.waited.get(lastRank) ?? 0) + Math.min(took, spent(last)));
  }
  return [...of].map(([name, { took, count, met, waited }]) => {
    const [rank, longest] = [...waited].reduce((a, b) => (b[1] > a[1] ? b : a), [0, 0]);
    const share = Math.round((100 * longest) / (took || 1));
    return `${met.size} ${name}, ${formatSpan(took / count)} each${share ? `, ${share} % waiting for rank ${rank}` : ""}`;
  });
}

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
 * as parts of the row's height. Of slices that would cover each other one is placed. With two
 * `floors` slices that overlap in time are drawn below each other.
 */
export function layOut(slices, x, now, floors, place) {
  const covered = [-Infinity, -Infinity];
  const ends = [-Infinity, -Infinity];
  for (const slice of slices) {
    const until = endOf(slice, now);
    const floor = floors > 1 && within(slice, ends[0], now) ? 1 : 0;
    ends[floor] = Math.max(ends[floor], until);
    const x0 = x(calledAt(slice));
    const bad = ["failed", "refused"].includes(PHASES[slice[PHASE]]);
    const x1 = Math.max(x(until), x0 + (bad ? LEAST_BAD : 1.5));
    if (x1 < covered[floor] + 0.5 && !bad) continue;
    covered[floor] = x1;
    place(slice, x0, x1, floor / floors, 1 / floors);
  }
}

/** The part of the axis that is shown: it follows the end until the user moves it. */
export class Window {
  constructor() {
    this.follow = true;
    [this.from, this.to] = [0, 1e6];
  }

  /** Follow the newest slices and pending ones; true while time alone moves the window. */
  update(store, now) {
    if (!this.follow || !store.rows.size) return false;
    const newest = [...store.rows.values()].map(({ list }) => store.newest(list, 24));
    const latest = Math.max(...newest.map(([, run]) => run ?? 0));
    const from = store.axis(Math.min(...newest.filter(([, run]) => (run ?? 0) === latest).map(([slice]) => calledAt(slice))));
    const [last, end] = [store.axis(store.last), store.axis(now)];
    const shown = Math.max(last - from, 200);
    // A long wait must not push its history out of sight.
    const to = store.pending ? Math.min(end, last + Math.max(0.4 * shown, 2e4)) : last + 0.03 * shown;
    const near = this.set && Math.abs(this.from - from) < 0.04 * shown && to <= this.to && to > this.to - 0.2 * shown;
    if (!near) [this.from, this.to, this.set] = [from - 0.02 * shown, Math.max(to, from + 100), true];
    return store.pending > 0 && end <= this.to;
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
    const run = store.runAt(store.timeOf((this.from + this.to) / 2));
    this.follow = false;
    const [first, to, open] = store.spanOf(run);
    const [from, end] = [first, open ? Math.max(now, to) : to].map((at) => store.axis(at));
    const span = Math.max(end - from, 100);
    [this.from, this.to] = [from - 0.02 * span, end + 0.02 * span];
  }
}

/** A rank's height in pixels: any number of ranks leaves room for what stands below them. */
export const rowHeight = (worldSize) => Math.min(24, 256 / worldSize);

/** Round times inside a span, some six of them. */
export function ticks(from, to, most = 6) {
  const rough = (to - from) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const times = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) times.push(at);
  return times;
}
