// The live board's pure functions: words, rank sets, brackets, slices, the window of time.

import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";
import { test } from "node:test";

const folder = new URL("../../ddp_notebook/board/page/", import.meta.url);
const files = readdirSync(folder).filter((name) => name.endsWith(".js")).sort();
// As it is written, or as a page gets it.
const source = process.env.BOARD_SCRIPT ? readFileSync(process.env.BOARD_SCRIPT) : files.map((name) => readFileSync(new URL(name, folder))).join("\n");
const board = await import(`data:text/javascript;base64,${Buffer.from(source).toString("base64")}`);

const KIND = ["all_reduce", "", "backward", 2, "default", "float32", [28], 112, "SUM", -1, "train.py, line 41, in step", "loss.backward()", "", 1];
const [PAUSED, ISSUED, DONE, FAILED, REFUSED, FREED] = [0, 1, 2, 3, 4, 5];

/** A message as the kernel sends it. */
const message = (slices, more = {}) => ({ kind: "slices", run: 1, generation: 1, first_kind: 0, kinds: [KIND], slices, skipped: 0, ...more });

function filled(slices, worldSize = 4) {
  const store = new board.Store(worldSize);
  assert.ok(store.take(message(slices)));
  return store;
}

test("rank sets are read and written as everywhere else", () => {
  for (const [text, ranks] of [["0", [0]], ["0,2-4", [0, 2, 3, 4]], ["1-3,7", [1, 2, 3, 7]], ["", []]]) {
    assert.deepEqual(board.parseRanks(text), ranks);
    assert.equal(board.formatRanks(ranks), text);
  }
  assert.equal(board.formatRanks([3, 1, 2, 1]), "1-3");
  assert.equal(board.nameRanks("3"), "rank 3");
  assert.equal(board.nameRanks("0-3"), "ranks 0-3");
  assert.equal(board.nameRanks("0,2"), "ranks 0 and 2");
});

test("spans and sizes are said in words of their size", () => {
  const spans = [[0, "0 µs"], [12.4, "12 µs"], [3400, "3.4 ms"], [2e3, "2 ms"], [15e3, "15 ms"], [1.5e6, "1.5 s"], [240e6, "4 min"], [8e9, "2 h"]];
  for (const [us, words] of spans) assert.equal(board.formatSpan(us), words);
  for (const [us, words] of [[0, "< 1 s"], [12e6, "12 s"], [180e6, "3 min"]]) assert.equal(board.formatAge(us), words);
  for (const [count, words] of [[4, "4 B"], [65536, "64 KiB"], [1572864, "1.5 MiB"]]) assert.equal(board.formatBytes(count), words);
});

test("a magic takes the chosen ranks, in the place of its own", () => {
  const step = { magic: "%ddp_step --to end", takes_ranks: true };
  assert.equal(board.magicFor(step, new Set()), "%ddp_step --to end");
  assert.equal(board.magicFor(step, new Set([3, 1])), "%ddp_step --to end --ranks 1,3");
  assert.equal(board.magicFor({ magic: "%ddp_restart --ranks 1", takes_ranks: true }, new Set([2])), "%ddp_restart --ranks 2");
  assert.equal(board.magicFor({ magic: "%ddp_abort", takes_ranks: false }, new Set([2])), "%ddp_abort");
});

test("a word that does not fit is cut with an ellipsis, or left out", () => {
  const fits = (most) => (text) => text.length <= most;
  assert.equal(board.cutTo("all_reduce", fits(8)), "all_red…");
  assert.equal(board.cutTo("all_reduce", fits(3)), "");
});

test("a line of a cell is a place on the page, one of a file is not", () => {
  assert.deepEqual(board.siteOf("cell 3, line 14, in train"), { cell: 3, line: 14 });
  assert.equal(board.siteOf("train.py, line 41, in step"), null);
});

test("every role has a mark and a word beside its colour, one of seven", () => {
  const words = new Set();
  for (const role of ["culprit", "late", "dead", "failed", "paused", "waiting", "running", "ready", "raised", "refused", "groupless", "ended"]) {
    const { mark, word, tone } = board.lookOf({ role, status: "running", word: role });
    assert.ok(mark && word && tone);
    words.add(word);
  }
  assert.deepEqual([...words].sort(), Object.keys(board.STATES).sort());
  assert.equal(words.size, 7);
  assert.equal(board.lookOf({ role: "running", status: "setting up" }).word, "setting up");
  assert.equal(board.lookOf({ role: "waiting", status: "running", word: "running" }).word, "running", "a healthy run does not flicker");
  assert.deepEqual(board.lookOf({ role: "silent", status: "running", word: "running" }), { mark: "?", word: "running", tone: "idle" });
});

test("the state of the session follows its ranks, and says by which tab it is seen", () => {
  const rows = (...all) => ({ rows: all.map(([role, status, stages_passed = 6]) => ({ role, status, stages_passed })) });
  const [wrong, late] = [[{ passing: false }], [{ passing: true }]];
  const ready = ["ready", "ready"], running = ["running", "running"];
  for (const [state, tab, given, findings = []] of [
    ["ready", "variables", rows(ready, ready)],
    ["running", "output", rows(ready, running)],
    ["running", "output", rows(["late", "running"], ["waiting", "running"]), late],
    ["running", "output", rows(["silent", "running"])],
    ["paused", "code", rows(["paused", "running"], running)],
    ["set-up", "problem", rows(["paused", "paused", 1], ready)],
    ["set-up", "problem", { rows: [], loading: {} }],
    ["set-up", "problem", rows(["running", "setting up", 2])],
    ["hang", "problem", rows(["culprit", "ready"], ["waiting", "running"]), wrong],
    ["error", "problem", rows(["culprit", "dead"], ready), wrong],
    ["error", "problem", rows(["raised", "ready"], ready)],
    ["ended", "problem", rows(["ended", "ready"])],
  ]) {
    assert.equal(board.stateOf(given, findings, 6), state);
    assert.equal(board.SESSION[state][1], tab);
  }
});

test("a slice that comes twice is one, and its end is taken over", () => {
  const store = filled([[0, 0, 0, 0, 100, 0, ISSUED]]);
  assert.equal(store.pending, 1);
  store.take(message([[0, 0, 0, 0, 100, 250, DONE]], { first_kind: 1, kinds: [] }));
  store.take(message([[0, 0, 0, 0, 100, 250, DONE]], { first_kind: 1, kinds: [] }));
  assert.equal(store.rows.get(0).list.length, 1);
  assert.equal(store.pending, 0);
  assert.equal(store.last, 250);
});

test("who arrived last at a collective is known, and for how long the others waited", () => {
  const store = filled([
    [0, 0, 0, 0, 100, 900, DONE],
    [1, 0, 0, 0, 700, 900, DONE],
  ]);
  const [first, what, where, took] = store.describe(store.rows.get(0).list[0], 1000);
  assert.equal(first, "rank 0 · all_reduce · done · #0");
  assert.equal(what, "float32 [28] · 112 B · bucket 2 of DDP's backward");
  assert.equal(where, "train.py, line 41, in step   loss.backward()");
  assert.equal(took, "took 800 µs · waited 600 µs for rank 1");
  assert.match(store.describe(store.rows.get(1).list[0], 1000).at(-1), /last to arrive, 600 µs after the first/);
});

test("a paused collective is not issued yet", () => {
  const store = filled([
    [0, 0, 0, 0, 100, 0, ISSUED],
    [1, 0, 0, 0, 700, 0, PAUSED],
  ]);
  const [slice] = store.rows.get(0).list;
  assert.equal(slice[9].size, 1);
  store.take(message([[1, 0, 0, 0, 900, 0, ISSUED]], { first_kind: 1, kinds: [] }));
  store.take(message([[1, 0, 0, 0, 900, 0, ISSUED]], { first_kind: 1, kinds: [] }));
  assert.deepEqual([slice[9].size, slice[9].lastRank], [2, 1]);
});

test("the time for which a rank was held is no time of the collective", () => {
  const store = filled([
    [0, 0, 0, 0, 3e6, 33.1e6, DONE, 2e6], // stepped alone: it waited for the rank that was held longer
    [1, 0, 0, 0, 33e6, 33.1e6, DONE, 32e6],
  ]);
  const [alone, last] = [0, 1].map((rank) => store.describe(store.rows.get(rank).list[0], 40e6));
  assert.equal(last.at(-1), "took 100 ms · last to arrive, 30 s after the first");
  assert.match(last.at(-2), /^paused for 32 s before it/);
  assert.equal(alone.at(-1), "took 30 s · waited 30 s for rank 1");
  assert.equal(store.first, 1e6);
  assert.equal(store.seen(1, 2e6, 4e6).length, 1, "it is seen while it is held");
});

test("a pause at a line is held time of its rank, among its collectives", () => {
  const AT_LINE = 6;
  const PAUSE = ["line 7", "", "", 0, "", "", [], 0, "", -1, "cell 3, line 7", "x = 1", "breakpoint()", 1];
  const store = filled([[0, 0, 0, 0, 1e6, 1.1e6, DONE, 0], [0, 1, 0, 1, 9e6, 9.1e6, DONE, 0], [0, -5, 1, 1, 2e6, 0, PAUSED, 0]]);
  store.take(message([], { first_kind: 1, kinds: [PAUSE] }));
  const pause = store.rows.get(0).list[1];
  assert.equal(pause[1], -5, "where it was in time");
  assert.equal(store.pending, 1);
  store.take(message([[0, -5, 1, 1, 2e6, 8e6, AT_LINE, 0]], { first_kind: 2, kinds: [] }));
  assert.equal(store.pending, 0);
  assert.deepEqual(store.describe(pause, 20e6), ["rank 0 · line 7 · paused · #1", "breakpoint()", "cell 3, line 7   x = 1", "paused for 6 s"]);
  assert.equal(store.collectives.size, 2, "it is none of the collectives");
});

test("while ranks wait for another, none of them is called the last to arrive", () => {
  const store = filled([[0, 0, 0, 0, 100, 0, ISSUED], [1, 0, 0, 0, 700, 0, ISSUED]]);
  for (const rank of [0, 1]) {
    const words = store.describe(store.rows.get(rank).list[0], 5e6).at(-1);
    assert.match(words, /^waits for/);
    assert.doesNotMatch(words, /last to arrive|for rank/);
  }
});

test("a collective that was freed late does not squeeze the others", () => {
  const store = filled([[0, 0, 0, 0, 1000, 2000, DONE, 0], [0, 1, 0, 1, 3000, 89e6, FREED, 0]]);
  const view = new board.Window();
  view.update(store, 90e6);
  assert.ok(view.span < 10e3);
  assert.match(store.describe(store.rows.get(0).list[1], 90e6).at(-1), /^freed after 89 s/);
  view.fit(store, 90e6);
  assert.ok(view.to > 89e6);
});

test("messages of another run replace what was there; a gap is noticed", () => {
  const store = filled([[0, 0, 0, 0, 100, 0, ISSUED]]);
  assert.ok(store.take(message([[1, 0, 0, 0, 5, 6, DONE]], { generation: 2, run: 2 })));
  assert.deepEqual([...store.rows.keys()], [1]);
  assert.equal(store.pending, 0);
  assert.equal(store.take(message([], { generation: 2, first_kind: 7, kinds: [] })), false);
});

test("what was lost on the way is noticed by the number of the next message, however short the gap", () => {
  const store = filled([]);
  store.count(1, true);
  store.count(1, false); // a heartbeat after it
  assert.equal(store.missed, false);
  store.count(3, false); // a heartbeat: 2 and 3 were lost
  assert.equal(store.missed, true);
  store.count(4, true);
  assert.equal(store.missed, true, "what comes later does not bring it");
  store.count(5, true, true);
  assert.equal(store.missed, false);
  store.count(6, false); // slices that continue what is not known
  assert.equal(store.missed, true);
});

test("an hour of collectives leaves as many as are kept", () => {
  const store = new board.Store(64);
  store.take(message([]));
  for (let i = 0; i < 20_000; i++) store.take(message([[i % 64, Math.floor(i / 64), 0, i, i, i + 1, DONE]], { first_kind: 1, kinds: [] }));
  for (let i = 0; i < 20_000; i++) store.take(message([[0, 1000 + i, 0, 1000 + i, i, i + 1, DONE]], { first_kind: 1, kinds: [] }));
  const { list, at } = store.rows.get(0);
  assert.ok(list.length <= store.perRank * 1.25 && at.size === list.length);
  assert.ok(store.collectives.size <= 20_000);
  assert.equal(list.at(-1)[1], 20_999);
});

test("the first slice that is seen is found, also a long one from before", () => {
  const store = filled([
    [0, 0, 0, 0, 0, 5000, DONE],
    [0, 1, 0, 1, 6000, 7000, DONE],
    [0, 2, 0, 2, 8000, 0, ISSUED],
  ]);
  const { list } = store.rows.get(0);
  assert.equal(store.startOf(list, 4000), 0);
  assert.equal(list[store.startOf(list, 7500)][1] <= 2, true);
  assert.equal(board.overlap(list, 9000), false);
  assert.equal(board.overlap([[0, 0, 0, 0, 0, 50, DONE], [0, 1, 0, 1, 20, 60, DONE]], 99), true);
});

test("of a row what reaches into a part of time is seen, and nothing else is looked at", () => {
  const store = filled(Array.from({ length: 500 }, (_, i) => [0, i, 0, i, 1000 * i, 1000 * i + 400, DONE]));
  const numbers = store.seen(0, 100_000, 103_500).map(([, number]) => number);
  assert.deepEqual(numbers.slice(-4), [100, 101, 102, 103]);
  assert.ok(numbers.length <= 5); // one before may be among them
  assert.deepEqual(store.seen(7, 0, 1e9), []);
});

/** Where slices stand on a line of a pixel per microsecond: [number, x0, x1, top, tall]. */
function laidOut(slices, floors = 1) {
  const found = [];
  board.layOut(slices, (at) => at, 1000, floors, (slice, ...where) => found.push([slice[1], ...where]));
  return found;
}

test("slices that would cover each other are drawn once", () => {
  const tight = Array.from({ length: 1000 }, (_, i) => [0, i, 0, i, i / 100, i / 100 + 0.005, DONE]);
  const found = laidOut(tight);
  assert.ok(found.length <= 25); // a thousand in ten pixels
  assert.ok(found.at(-1)[2] >= 9.5); // and they are seen up to the end
  assert.deepEqual(laidOut([[0, 0, 0, 0, 900, 0, ISSUED]]), [[0, 900, 1000, 0, 1]]);
});

test("two buckets under way at once stand below each other where there is room", () => {
  const both = [[0, 0, 0, 0, 0, 50, DONE], [0, 1, 0, 1, 20, 60, DONE], [0, 2, 0, 2, 70, 90, DONE]];
  assert.deepEqual(laidOut(both, 2), [[0, 0, 50, 0, 0.5], [1, 20, 60, 0.5, 0.5], [2, 70, 90, 0, 0.5]]);
  assert.ok(laidOut(both).every(([, , , top, tall]) => top === 0 && tall === 1));
});

test("a refused collective does not count as issued", () => {
  const store = filled([[0, 0, 0, 0, 100, 900, REFUSED], [0, 1, 0, 0, 200, 900, DONE], [1, 0, 0, 0, 150, 900, DONE]]);
  assert.deepEqual([store.rows.get(1).list[0][9].size, store.rows.get(1).list[0][9].lastRank], [2, 0]);
});

test("the page is drawn again by itself only while time moves something", () => {
  const store = filled([[0, 0, 0, 0, 1000, 2000, DONE], [0, 1, 0, 1, 3000, 0, ISSUED]]);
  const window = new board.Window();
  assert.equal(window.update(store, 3500), true);
  assert.equal(window.update(store, 60e6), false); // what waits reaches the edge already
  store.take(message([[0, 1, 0, 1, 3000, 4000, DONE]], { first_kind: 1, kinds: [] }));
  assert.equal(window.update(store, 60e6), false);
  window.zoom(0.5);
  assert.equal(window.update(store, 60e6), false);
});

test("the window follows the end until a person moves it", () => {
  const store = filled([[0, 0, 0, 0, 1000, 2000, DONE], [0, 1, 0, 1, 3000, 4000, DONE]]);
  const window = new board.Window();
  window.update(store, 4000);
  assert.ok(window.from < 1000 && window.to > 4000);
  window.zoom(0.5);
  const { from, to } = window;
  window.update(store, 9000);
  assert.deepEqual([window.from, window.to], [from, to]);
  window.centre(2000);
  assert.ok(Math.abs((window.from + window.to) / 2 - 2000) < 1e-6);
  window.fit(store, 4000);
  assert.ok(window.from <= 1000 && window.to >= 4000);
});

test("a collective that waits for long does not push its history out of sight", () => {
  const store = filled([[0, 0, 0, 0, 1000, 2000, DONE], [0, 1, 0, 1, 3000, 0, ISSUED]]);
  const window = new board.Window();
  window.update(store, 60e6);
  assert.ok(window.span < 100_000 && window.from < 1000);
});

test("64 ranks leave room below them, and 1,024 too", () => {
  for (const [size, most] of [[4, 100], [64, 256], [1024, 256]]) assert.ok(board.rowHeight(size) * size <= most);
});

test("ticks are round and inside", () => {
  const found = board.ticks(130, 1970);
  assert.ok(found.length >= 3 && found.length <= 7);
  for (const at of found) assert.ok(at >= 130 && at <= 1970 && at % 100 === 0);
});

test("failed collectives do not count as pending", () => {
  assert.equal(filled([[0, 0, 0, 0, 1, 2, FAILED]]).pending, 0);
});

test("times on the axis differ from each other", () => {
  assert.deepEqual([23.1e6, 23.2e6, 24e6].map((at) => board.formatTick(at, 1e5)), ["23.1 s", "23.2 s", "24.0 s"]);
  assert.deepEqual([0, 5e3, 1e4].map((at) => board.formatTick(at, 5e3)), ["0", "5 ms", "10 ms"]);
  assert.equal(board.formatTick(2500, 500), "2.5 ms");
  assert.equal(board.formatTick(20, 20), "20 µs");
});

/** Slices of which `cuts` are left out of the axis. */
function cutOut(cuts, slices) {
  const store = new board.Store(4);
  store.take(message(slices, { cuts }));
  return store;
}

test("the axis goes on behind a pause as if it had not been, and back again", () => {
  const store = cutOut([[1e6, 47e6], [50e6, 51e6]], []);
  assert.deepEqual([0, 1e6, 30e6, 47e6, 49e6, 50.5e6, 52e6].map((at) => store.axis(at)), [0, 1e6, 1e6, 1e6, 3e6, 4e6, 5e6]);
  for (const at of [0, 5e5, 48e6, 60e6]) assert.equal(store.timeOf(store.axis(at)), at);
  store.take(message([], { first_kind: 1, kinds: [], cuts: [] }));
  assert.equal(store.axis(49e6), 49e6);
});

test("a pause does not squeeze what was before and after it, and no wait is as long as it", () => {
  const slices = [[0, 0, 0, 0, 0.9e6, 0.95e6, DONE, 0, 1], [0, 1, 0, 1, 1e6, 47.1e6, DONE, 0, 2], [1, 1, 0, 1, 47e6, 47.1e6, DONE, 0, 2]];
  const store = cutOut([[1e6, 47e6]], slices);
  const view = new board.Window();
  view.update(store, 47.2e6);
  assert.ok(view.span < 1e6, `${view.span}`);
  assert.deepEqual(board.sums(store.rows.get(0).list.slice(1), store, 48e6), ["1 all_reduce, 100 ms each"]);
});

test("what is selected is summed by operation, with whom the ranks waited for", () => {
  const store = filled([
    [0, 0, 0, 0, 1000, 4000, DONE, 0, 1], [1, 0, 0, 0, 3000, 4000, DONE, 0, 1],
    [0, 1, 1, 1, 5000, 6000, DONE, 0, 1], [0, -5, 1, 1, 7000, 9000, 6, 0, 0],
  ]);
  store.take(message([], { first_kind: 1, kinds: [["barrier", ...KIND.slice(1)]] }));
  const all = [...store.rows.values()].flatMap(({ list }) => list);
  assert.deepEqual(board.sums(all, store, 1e4), ["1 all_reduce, 2 ms each, 50 % waiting for rank 1", "1 barrier, 1 ms each"]);
  assert.deepEqual(board.sums([], store, 1e4), []);
});

test("steps are backward passes, counted from 0, where the first of their collectives begins", () => {
  const buckets = [[0, 0], [1, 1], [2, 1], [3, 2], [4, 2], [5, 3]];
  const store = filled(buckets.map(([number, step]) => [0, number, 0, number, 1000 * (number + 1), 1000 * number + 1500, DONE, 0, step]));
  assert.deepEqual(store.steps(0, 0, 1e6), [[0, 2000], [1, 4000], [2, 6000]]);
  assert.deepEqual(store.steps(0, 5500, 1e6).at(-1), [2, 6000]);
  assert.deepEqual(store.steps(3, 0, 1e6), []);
});
