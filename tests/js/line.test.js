// The line above a running cell's output, on a page of a few lines.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

const folder = new URL("../../ddp_notebook/board/", import.meta.url);
const files = ["page/anywidget.js", "running_line.js"].map((name) => readFileSync(new URL(name, folder)));
const line = await import(`data:text/javascript;base64,${Buffer.concat(files).toString("base64")}`);

class Element {
  children = [];
  disconnected = false;
  setAttribute() {}
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; }
  closest() { return this.disconnected ? this : null; }
  /** All below that have a name. */
  of(name) { return this.children.flatMap((each) => [...(each.className === name ? [each] : []), ...each.of(name)]); }
}

test("a cell whose kernel was restarted is not said to run, and has no buttons", () => {
  globalThis.document = { createElement: () => new Element() };
  const state = { text: "Cell 3 is running on ranks 0-1", age_s: 3, over: false, busy: [], answers: [] };
  const heard = [];
  const model = { get: (name) => state[name], on: (_, call) => heard.push(call), off() {}, send() {} };
  const page = new Element();
  const close = line.default.render({ model, el: page });
  try {
    const [root] = page.of("ddpl");
    const [text] = page.of("ddpl-text");
    const [clock] = page.of("ddpl-clock");
    const buttons = () => page.of("ddpl-row")[0].children.slice(1, 3);
    assert.equal(text.textContent, state.text);
    assert.deepEqual([clock.hidden, ...buttons().map((each) => each.hidden)], [false, false, false]);
    root.disconnected = true;
    heard[1](); // what the clock does each second
    assert.match(text.textContent, /the kernel ended, and the ranks with it/);
    assert.deepEqual([clock.hidden, ...buttons().map((each) => each.hidden)], [true, true, true]);
    Object.assign(state, { over: true, text: "finished in 3 s" });
    heard[0]();
    assert.equal(text.textContent, "finished in 3 s");
  } finally {
    close();
  }
});

test("a restart that Jupyter does not mark is noticed: the way to the kernel is closed", () => {
  globalThis.document = { createElement: () => new Element() };
  const state = { text: "Cell 3 is running on ranks 0-1", age_s: 3, over: false, busy: [], answers: [] };
  const [calls, sent, now] = [[], [], Date.now];
  let gone = false;
  const send = (message) => { if (gone) throw new Error("disposed"); sent.push(message); };
  const page = new Element();
  const close = line.default.render({ model: { get: (name) => state[name], on: (_, call) => calls.push(call), off() {}, send }, el: page });
  const after = (ms) => { Date.now = () => now() + ms; calls[1](); };
  try {
    const [text] = page.of("ddpl-text");
    after(5000);
    assert.deepEqual(sent, []); // a kernel that is heard is not asked
    after(8000);
    assert.deepEqual(sent, [{ kind: "here" }]);
    assert.equal(text.textContent, state.text);
    gone = true;
    after(16000);
    assert.match(text.textContent, /the kernel ended, and the ranks with it/);
  } finally {
    Date.now = now;
    close();
  }
});

test("a restart is seen within a second where the way to the kernel shows that it is closed", async () => {
  globalThis.document = { createElement: () => new Element() };
  const state = { text: "Cell 3 is running on ranks 0-1", age_s: 3, over: false, busy: [], answers: [] };
  const calls = [];
  class Base { _handle_comm_msg() {} }
  class Own extends Base { _handle_comm_msg() {} }
  const comm = { on_msg() {}, jsServicesComm: { isDisposed: false } };
  const widget_manager = { get_model: async () => Object.assign(new Own(), { comm }) };
  const page = new Element();
  const close = line.default.render({ model: { get: (name) => state[name], on: (_, call) => calls.push(call), off() {}, send() {}, widget_manager }, el: page });
  try {
    await new Promise(setImmediate);
    const [text] = page.of("ddpl-text");
    const [clock] = page.of("ddpl-clock");
    calls[1](); // what the clock does each second
    assert.deepEqual([text.textContent, clock.hidden], [state.text, false]);
    comm.jsServicesComm.isDisposed = true;
    calls[1]();
    assert.match(text.textContent, /the kernel ended, and the ranks with it/);
    assert.ok(clock.hidden);
  } finally {
    close();
  }
});
