// Lines of code as links: to the line in its cell, where the page has it.

/** A call site, `cell 3:4 in f`, as a link to its line if it is one of a cell. */
function siteLink(site) {
  if (!siteOf(site)) return make("span", { class: "ddpb-site" }, site);
  return make("button", { class: "ddpb-site ddpb-link", type: "button", title: "Show this line in its cell", onclick: () => goToSite(site) }, site);
}

/** Which cell and which line; null for a file's. */
export function siteOf(site) {
  const [, cell, line] = /^cell (\d+):(\d+)/.exec(site) ?? [];
  return cell ? { cell: Number(cell), line: Number(line) } : null;
}

/** Scroll to the line and mark it for a while. A cell that runs has a star for its number. */
function goToSite(site) {
  const { cell, line } = siteOf(site);
  const cells = [...document.querySelectorAll(".jp-CodeCell")];
  const numbered = (text) => cells.filter((each) => each.querySelector(".jp-InputPrompt")?.textContent.trim() === text);
  const found = numbered(`[${cell}]:`).at(-1) ?? numbered("[*]:")[0];
  if (!found) return false;
  const lines = found.querySelectorAll(".cm-line");
  const target = lines[line - 1] ?? found;
  target.scrollIntoView({ block: "center", behavior: "smooth" });
  target.classList.add("ddpb-marked");
  setTimeout(() => target.classList.remove("ddpb-marked"), 4000);
  return true;
}
