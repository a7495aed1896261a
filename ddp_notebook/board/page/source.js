// The lines at which ranks are paused: who stands where, breakpoints, the values there.

/** What a click beside a line does: sets a breakpoint there, or takes it away. */
export function breakOf(file, line) {
  const known = file.breakpoints.find((each) => each.line === line);
  return known ? `%ddp_break --clear ${known.number}` : file.break && `${file.break}${line}`;
}

/** Rows in the order of what is looked for: first the names on the lines at which ranks are. */
export function nearFirst(rows, files) {
  const here = files.flatMap(({ lines, at }) => lines.filter(([number]) => at.some(({ line }) => line === number)));
  const names = new Set(here.flatMap(([, text]) => text.match(/[A-Za-z_]\w*/g) ?? []));
  return [...rows].sort((one, other) => names.has(other.name) - names.has(one.name));
}

/** `state` gives what is known by its name, `act` runs a magic. */
class Source {
  constructor(page, act) {
    this.act = act;
    const ranks = () => (page.chosen.size ? ` --ranks ${formatRanks(page.chosen)}` : "");
    const told = make("span", { role: "status" });
    this.words = make("span", { role: "status" });
    const ask = make("input", { type: "search", placeholder: "an expression, Enter", "aria-label": "Evaluate on the chosen ranks, by a new cell", onkeydown: (e) => e.key === "Enter" && e.target.value && offer(page.el, `%ddp_print${ranks()} ${e.target.value}`, told) });
    this.set = (name, value) => offer(page.el, `%ddp_set${ranks()} ${name} = ${value}`, told);
    this.title = make("div", { class: "ddpb-about" }, this.words, ask, told);
    this.code = make("div", { class: "ddpb-code", onkeydown: (e) => this.key(e) });
    this.aside = make("div");
    this.el = make("div", { class: "ddpb-stops" }, this.title, this.code, this.aside);
  }

  draw(state, { title = "", files = [], breakpoints = [] }) {
    this.code.classList.toggle("ddpb-old", isMoving(state));
    // What is shown stays until all have arrived.
    if (isMoving(state)) return;
    show(this.words, title, () => title);
    const focused = this.code.contains(document.activeElement) && document.activeElement.dataset.at;
    if (show(this.code, files, () => files.map((file) => codeOf(file, this.act)))) this.reveal();
    if (focused) this.code.querySelector(`[data-at="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
    const [stack, table] = [state("stack"), state("variables")];
    show(this.aside, [stack?.classes, table?.sections, files, breakpoints], () => [
      (stack?.classes ?? []).map(pathOf),
      (table?.sections ?? []).map((section) => variablesOf({ ...section, rows: nearFirst(section.rows, files) }, this.set)),
      breakpoints.length > 0 && make("ul", { class: "ddpb-breakpoints", "aria-label": "Breakpoints" }, breakpoints.map(({ number, text, off }) => make("li", {}, text, off && " (off)", " ", small({ "aria-label": `Clear breakpoint ${number}`, onclick: () => this.act(`%ddp_break --clear ${number}`) }, "×")))),
    ]);
  }

  /** From line to line: only those with a stop or a breakpoint are reached by Tab. */
  key(event) {
    const all = [...this.code.querySelectorAll(".ddpb-gutter")];
    const next = all[all.indexOf(event.target) + { ArrowUp: -1, ArrowDown: 1 }[event.key]];
    next?.focus();
    if (next) event.preventDefault();
  }

  /** Scroll to the stops, no farther than it takes to see them. In a narrow board the whole panel scrolls. */
  reveal() {
    const here = [...this.code.querySelectorAll(".ddpb-here")];
    if (!here.length) return;
    const own = this.code.scrollHeight > this.code.clientHeight;
    const box = own ? this.code : this.code.closest("[role=tabpanel]");
    const top = (line) => line.getBoundingClientRect().top - box.getBoundingClientRect().top + box.scrollTop;
    const highest = top(here[0]) - 20 - (own ? 0 : this.title.offsetHeight);
    box.scrollTop = Math.min(highest, Math.max(top(here.at(-1)) + 40 - box.clientHeight, box.scrollTop));
  }
}

/** Ranks are on their way from a line, or through setup. */
const isMoving = (state) => state("busy").some((magic) => magic.startsWith("%ddp_step"));

function codeOf(file, act) {
  let last = 0;
  const rows = file.lines.map(([number, text]) => {
    const gap = last > 0 && number > last + 1;
    last = number;
    return [gap && make("div", {}, "⋮"), codeRow(file, number, text, act)];
  });
  return make("figure", { class: "ddpb-file" }, make("figcaption", { title: file.path }, file.name), rows.flat());
}

function codeRow(file, number, text, act) {
  const at = file.at.find(({ line }) => line === number);
  const known = file.breakpoints.find(({ line }) => line === number);
  const magic = breakOf(file, number);
  return make("div", { class: at ? "ddpb-here" : null },
    magic && make("button", { class: `ddpb-gutter${known?.off ? " ddpb-off" : ""}`, type: "button", "data-at": `${file.name}:${number}`, "aria-pressed": String(Boolean(known)), "aria-label": `Breakpoint at line ${number}`, title: known ? `${known.text}. ${magic}` : magic, tabindex: at || known ? "0" : "-1", onclick: () => act(magic) }),
    make("i", {}, String(number)),
    make("code", {}, text || (number === 1 && !file.path ? "%%ddp" : " ")),
    at && make("b", { title: at.text }, `◂ ${nameRanks(at.ranks)}`));
}

/** The user's lines through which ranks came to where they are, the innermost first. */
function pathOf({ ranks, frames }) {
  const own = frames.filter(({ library }) => !library).reverse();
  return make("div", {}, make("b", {}, nameRanks(ranks)), own.map((frame, i) => [i ? " ← " : " ", frame.function, " ", frame.at && siteLink(frame.at, frame.source, frame.file)]).flat());
}
