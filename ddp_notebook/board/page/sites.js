// Lines of code as links: to the line in its cell, where the page has it.

/**
 * A call site, `cell 3, line 4, in f`, as a link to its line if it is one of a cell. `source` is that line, by
 * which it is found after the cell was edited; where there is no such cell, the code beside is unfolded.
 */
function siteLink(site, source = "", file = "") {
  if (!siteOf(site)) return make("span", { class: "ddpb-site", title: file }, site);
  const show = (e) => {
    const code = goToSite(site, source) ? null : e.currentTarget.parentNode.querySelector("pre");
    if (code) code.hidden = !code.hidden;
  };
  return make("button", { class: "ddpb-site ddpb-link", type: "button", title: "Show this line in its cell", onclick: show }, site);
}

/** Which cell and which line; null for a file's. */
export function siteOf(site) {
  const [, cell, line] = /^cell (\d+), line (\d+)/.exec(site) ?? [];
  return cell ? { cell: Number(cell), line: Number(line) } : null;
}

/** Press an element as a pointer does: some of JupyterLab's wait for no click. */
function press(element) {
  for (const kind of ["mousedown", "mouseup", "click"]) element.dispatchEvent(new MouseEvent(kind, { bubbles: true, cancelable: true, view: window, detail: 1 }));
}

/** Select the line's cell, scroll to the line and mark it until the next press; false without such a cell. */
function goToSite(site, source) {
  const found = findLine(siteOf(site), source.trim());
  if (!found) return false;
  const { cell, line } = found;
  press(cell.querySelector(".jp-InputPrompt"));
  (line ?? cell).scrollIntoView({ block: "center" });
  if (line) markLine(line);
  return true;
}

/** The cell with this number, or of those that run the one with this line in it; and the line, unless it is gone. */
function findLine({ cell, line }, source) {
  let edited = null;
  for (const each of [...document.querySelectorAll(".jp-CodeCell")].reverse()) {
    const number = /\[(\d+|\*)\]/.exec(each.querySelector(".jp-InputPrompt")?.textContent)?.[1];
    if (number !== String(cell) && number !== "*") continue;
    const lines = [...each.querySelectorAll(".cm-line")];
    const isIt = (at) => at && (!source || at.textContent.trim() === source);
    const at = isIt(lines[line - 1]) ? lines[line - 1] : lines.find((other) => source && isIt(other));
    if (at) return { cell: each, line: at };
    if (number === String(cell)) edited = { cell: each, line: null };
  }
  return edited;
}

/** The mark lies above the editor, which takes back what is changed in its own elements. */
function markLine(line) {
  const scroller = line.closest(".cm-scroller");
  const [box, around] = [line.getBoundingClientRect(), scroller.getBoundingClientRect()];
  const mark = make("div", { class: "ddpb-line-mark" });
  mark.style.cssText = `position: absolute; pointer-events: none; left: 0; right: 0; z-index: 1; background: rgba(240, 160, 0, 0.25); border-left: 3px solid #d08000; top: ${box.top - around.top + scroller.scrollTop}px; height: ${box.height}px`;
  document.querySelectorAll(".ddpb-line-mark").forEach((old) => old.remove());
  scroller.append(mark);
  setTimeout(() => document.addEventListener("pointerdown", () => mark.remove(), { once: true }), 50);
}

const TRAIN = "%%ddp\nmodel = DDP(torch.nn.Linear(8, 1))\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nfor step in range(100):\n    loss = model(torch.randn(16, 8)).pow(2).mean()\n    optimizer.zero_grad()\n    loss.backward()\n    optimizer.step()\nprint(\"loss\", loss.item())";
const HANG = "%%ddp\nx = torch.ones(1)\nif rank != 1:\n    dist.all_reduce(x)  # rank 1 does not call it";
const STOP = "%%ddp\nx = torch.randn(4) + rank\nbreakpoint()\ntotal = x.sum()\ndist.all_reduce(total)";

/** What to begin with: cells that are put into the notebook, for the user to run. */
function starters(el) {
  const told = make("span", { role: "status" });
  const insert = (code) => offer(el, code, told);
  const card = ([label, code]) => make("figure", { class: "ddpb-source" }, make("figcaption", {}, make("b", {}, label), " ", small({ onclick: () => insert(code), "aria-label": `Insert a cell that ${label}` }, "Insert")), make("pre", {}, code));
  return [make("p", {}, "Nothing has run yet. A cell that … ", told), make("div", { class: "ddpb-sources" }, [["trains", TRAIN], ["hangs", HANG], ["stops at a line", STOP]].map(card))];
}

/** Code for the user to run: a page runs none on the ranks by itself. `told` says where it is. */
async function offer(el, code, told) {
  const isIn = await insertCell(el, code);
  if (!isIn) await copy(code);
  told.textContent = isIn ? "It is in a new cell: run it." : "Copied: paste it into a new cell.";
}

/** Put code into a new cell below that of `el`, or below the last one; false where the page has no way to. */
async function insertCell(el, code) {
  const panel = el.closest(".jp-NotebookPanel") ?? [...document.querySelectorAll(".jp-NotebookPanel")].find((each) => each.checkVisibility());
  const cell = el.closest(".jp-Cell") ?? [...(panel?.querySelectorAll(".jp-Cell") ?? [])].at(-1);
  const insert = panel?.querySelector('[data-command="notebook:insert-cell-below"]');
  if (!cell?.querySelector(".jp-InputPrompt") || !insert) return false;
  press(cell.querySelector(".jp-InputPrompt"));
  press(insert);
  for (let tries = 0; tries < 100; tries++) {
    await new Promise((then) => setTimeout(then, 100));
    const made = panel.querySelector(".jp-Cell.jp-mod-active");
    const editor = made !== cell && made?.querySelector(".cm-content");
    if (!editor || editor.textContent) continue;
    const data = new DataTransfer();
    data.setData("text/plain", code);
    editor.focus();
    editor.dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true }));
    return true;
  }
  return false;
}
