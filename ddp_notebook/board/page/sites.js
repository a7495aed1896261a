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

/** Select the line's cell, scroll to the line and mark it until the next press; false without such a cell. */
function goToSite(site, source) {
  const found = findLine(siteOf(site), source.trim());
  if (!found) return false;
  const { cell, line } = found;
  const prompt = cell.querySelector(".jp-InputPrompt");
  for (const kind of ["mousedown", "mouseup", "click"]) prompt.dispatchEvent(new MouseEvent(kind, { bubbles: true, cancelable: true, view: window, detail: 1 }));
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
