// The tabs' pure functions: names of lines, equal neighbours, what is searched for, where answers go.

import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";
import { test } from "node:test";

const folder = new URL("../../ddp_notebook/board/page/", import.meta.url);
const files = readdirSync(folder).filter((name) => name.endsWith(".js")).sort();
// As it is written, or as a page gets it.
const source = process.env.BOARD_SCRIPT ? readFileSync(process.env.BOARD_SCRIPT) : files.map((name) => readFileSync(new URL(name, folder))).join("\n");
const board = await import(`data:text/javascript;base64,${Buffer.from(source).toString("base64")}`);

test("a line of a cell is known by its name, one of a file is not a cell's", () => {
  assert.deepEqual(board.siteOf("cell 5, line 4, in step"), { cell: 5, line: 4 });
  assert.equal(board.siteOf("train.py, line 41, in step"), null);
});

test("neighbours with the same value are one cell of the table", () => {
  const [same, odd] = [{ ranks: "0-1,3", text: "0.1" }, { ranks: "2", text: "0.01" }];
  assert.deepEqual(board.spans([0, 1, 2, 3], [same, odd]), [[0, 2, same], [2, 1, odd], [3, 1, same]]);
  const all = { ranks: "0-3", text: "1" };
  assert.deepEqual(board.spans([0, 1, 2, 3], [all]), [[0, 4, all]]);
});

test("what is searched for is found whatever its case, and the text stays the same", () => {
  for (const [text, query, hits] of [["Loss 0.5, loss 0.4", "loss", 2], ["aaa", "aa", 1], ["abc", "", 0], ["abc", "x", 0]]) {
    const parts = board.found(text, query);
    assert.equal(parts.map(([part]) => part).join(""), text);
    assert.equal(parts.filter(([, hit]) => hit).length, hits);
  }
});

test("an answer is shown with the problem, but for what is seen better elsewhere", () => {
  const tabs = [["%ddp_where", true], ["%ddp_where", false], ["%ddp_where --ranks 1", true], ["%ddp_why", true], ["%ddp_step --to end", true], ["%ddp_step --to end", false], ["interrupt the cell: I, I", true]];
  assert.deepEqual(tabs.map(([magic, ok]) => board.tabOf({ magic, ok })), ["code", "problem", "problem", "problem", "", "problem", "problem"]);
});

test("what all values of a row share is said once, and a number is left of each", () => {
  const cells = (...texts) => texts.map((text) => ({ text, absent: !text }));
  assert.deepEqual(board.shared(cells("float32 [4, 8] cpu, mean 0.03, std 1", "float32 [4, 8] cpu, mean -2, std 1", "")), ["float32 [4, 8] cpu, mean", ["0.03", "-2", ""]]);
  assert.deepEqual(board.shared(cells("float32 [2] cuda:0: 1, 2")), ["float32 [2] cuda:0", ["1, 2"]]);
  for (const other of [["0.1", "0.01"], ["float32 [2] cpu: 1, 2", "float32 [3] cpu: 1, 2, 3"], ["float32 [2] cpu: 1, 2", "none"]])
    assert.deepEqual(board.shared(cells(...other)), ["", other]);
});

test("values that the paused line names come first", () => {
  const files = [{ lines: [[6, "y = 1"], [7, "loss = model(x)"]], at: [{ line: 7 }] }];
  const rows = ["acc", "loss", "lr", "x", "y"].map((name) => ({ name }));
  assert.deepEqual(board.nearFirst(rows, files).map(({ name }) => name), ["loss", "x", "acc", "lr", "y"]);
});

test("keys step as they do elsewhere, unless another one is held with them", () => {
  const keys = [["F10"], ["F11"], ["F11", { shiftKey: true }], ["F8"], ["F10", { shiftKey: true }], ["F10", { ctrlKey: true }], ["a"]];
  const steps = keys.map(([key, more]) => board.stepOf({ key, shiftKey: false, ...more }));
  assert.deepEqual(steps, ["step", "into", "out", "continue", undefined, undefined, undefined]);
});

test("a click beside a line sets a breakpoint, or takes away the one that is there", () => {
  const file = { break: "%ddp_break 'cell 4':", breakpoints: [{ line: 7, number: 2 }] };
  assert.equal(board.breakOf(file, 6), "%ddp_break 'cell 4':6");
  assert.equal(board.breakOf(file, 7), "%ddp_break --clear 2");
  assert.equal(board.breakOf({ ...file, break: "" }, 6), "");
});

test("what the kernel has not taken in waits for a cell, and says so after a moment", () => {
  assert.equal(board.waitsFor(null, 9000), "");
  assert.equal(board.waitsFor(["%ddp_step", 8000], 9000), "");
  assert.match(board.waitsFor(["%ddp_step", 8000], 9900), /%ddp_step follows when it is over/);
});
