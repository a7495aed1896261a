// Below the ranks, in one place of fixed height: tabs for their stacks, variables, output and runs, and
// one for the answer of each button. The kernel is asked for what is open, and tells when it changes.

const TABS = [["stack", "Stack"], ["source", "Source"], ["variables", "Variables"], ["console", "Console"], ["history", "History"]];
/** On what has the focus: keys pressed there are not the notebook's, where an arrow goes to the next cell. */
const OWN_KEYS = { "data-lm-suppress-shortcuts": "true" };
const MOST_COLUMNS = 8; // of ranks beside each other; more are written below each other

/**
 * Draw all of it into `element`. `state` gives a part of what is known by its name, as
 * `widget.py` names them (`locations`, `answers`, ...); what is of the past has none of the lines
 * of now (`state("past")`). `send` sends a message to the kernel.
 */
function drawTabs(element, state, send) {
  element.tabs ??= new Tabs(element, send);
  element.tabs.draw(state);
}

/** Neighbours of a row that have the same value, as one: `[first, how many, value]`. */
export function spans(ranks, cells) {
  const of = new Map();
  for (const cell of cells) parseRanks(cell.ranks).forEach((rank) => of.set(rank, cell));
  const made = [];
  for (const rank of ranks) {
    const last = made.at(-1);
    if (last && last[2] === of.get(rank)) last[1]++;
    else made.push([rank, 1, of.get(rank)]);
  }
  return made;
}

/** Text as parts, each with whether it is what was searched for. */
export function found(text, query) {
  const [parts, low, word] = [[], text.toLowerCase(), query.toLowerCase()];
  let at = 0;
  for (let next = word ? low.indexOf(word) : -1; next >= 0; next = low.indexOf(word, at)) {
    if (next > at) parts.push([text.slice(at, next), false]);
    parts.push([text.slice(next, (at = next + word.length)), true]);
  }
  if (at < text.length) parts.push([text.slice(at), false]);
  return parts;
}

/** What a tab with an answer is called: `%ddp_step --to end` is `Step`. */
export function labelOf(magic) {
  const name = /^%ddp_(\w+)/.exec(magic)?.[1] ?? "answer";
  return name[0].toUpperCase() + name.slice(1);
}

/** Which tab a new answer is shown in: where ranks are has its own, with links. */
export const tabOf = ({ magic, ok, number }) => (ok && magic === "%ddp_where" ? "stack" : `answer-${number}`);

const codeAround = (lines, line, hidden) =>
  lines.length > 0 &&
  make("pre", { hidden }, lines.map(([number, text]) => make("div", { class: number === line ? "ddpb-here" : "" }, `${number === line ? "▸" : " "}${String(number).padStart(4)}  ${text}`)));

// ---- the tabs

class Tabs {
  constructor(element, send) {
    this.send = send;
    this.chosen = "stack";
    this.closed = new Set();
    this.id = `ddpb-${Math.random().toString(36).slice(2)}`;
    this.bodies = new Map();
    this.list = make("div", { class: "ddpb-tablist", role: "tablist", "aria-label": "More about the ranks", onkeydown: (e) => this.key(e) });
    this.panel = make("div", { class: "ddpb-panel", role: "tabpanel", id: `${this.id}-panel`, tabindex: "0", ...OWN_KEYS });
    element.append(this.list, this.panel);
  }

  draw(state) {
    this.state = state;
    const { frozen } = state("board") ?? {};
    this.fixed = frozen ? TABS.slice(0, 1) : TABS;
    this.answers = (state("answers") ?? []).filter(({ number }) => !this.closed.has(number));
    const newest = Math.max(0, ...this.answers.map(({ number }) => number));
    if (this.newest != null && newest > this.newest) this.choose(tabOf(this.answers.find(({ number }) => number === newest)));
    this.newest = Math.max(this.newest ?? 0, newest);
    const standing = Boolean(state("stops").files?.length) && !state("past");
    if (standing && !this.standing && !frozen) this.choose("source");
    this.standing = standing || (this.standing && isMoving(state));
    if (!this.known(this.chosen)) this.chosen = "stack";
    this.drawList();
    this.drawPanel();
  }

  get named() {
    const own = this.answers.filter((answer) => tabOf(answer).startsWith("answer-"));
    return [...this.fixed, ...own.map((answer) => [tabOf(answer), labelOf(answer.magic), answer])];
  }

  known(name) {
    return this.named.some(([each]) => each === name);
  }

  /** Open a tab. The kernel is told, and tells what is in it until another is opened. */
  choose(name, focus = false) {
    this.chosen = this.known(name) ? name : "stack";
    this.drawList();
    this.drawPanel();
    this.watch();
    if (focus) this.focusTab();
  }

  focusTab() {
    this.list.querySelector("[aria-selected=true]")?.focus();
  }

  watch() {
    this.watching = this.fixed.length > 1 && !this.chosen.startsWith("answer-");
    this.send({ kind: "watch", tab: this.watching ? this.chosen : "" });
  }

  close(number) {
    this.closed.add(number);
    this.send({ kind: "close", number });
    this.draw(this.state);
    this.focusTab();
  }

  key(event) {
    const names = this.named.map(([name]) => name);
    const at = names.indexOf(this.chosen);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: names.length - 1 }[event.key];
    const answer = this.named[at]?.[2];
    if (to != null) this.choose(names.at(to % names.length), true);
    else if (event.key === "Delete" && answer) this.close(answer.number);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  drawList() {
    const key = [this.named.map(([name, label, answer]) => [name, label, answer?.old, answer?.ok]), this.chosen];
    const focused = this.list.contains(document.activeElement);
    const drawn = show(this.list, key, () =>
      this.named.map(([name, label, answer]) => {
        const chosen = name === this.chosen;
        return make(
          "button",
          {
            class: `ddpb-tab${answer && !answer.ok ? " ddpb-bad" : ""}`, type: "button", role: "tab", id: `${this.id}-${name}`, "aria-selected": String(chosen),
            "aria-controls": `${this.id}-panel`, tabindex: chosen ? "0" : "-1", title: answer && `${answer.magic}. Delete closes it`, onclick: () => this.choose(name), ...OWN_KEYS,
          },
          label,
          answer?.old && make("small", {}, " old"),
        );
      }),
    );
    if (drawn && focused) this.focusTab();
    this.panel.setAttribute("aria-labelledby", `${this.id}-${this.chosen}`);
  }

  /** The element that a tab draws into; it stays, with what was typed and unfolded in it. */
  body(name) {
    if (!this.bodies.has(name)) this.bodies.set(name, make("div", { class: `ddpb-in-${name.split("-")[0]}${name.startsWith("answer-") ? " ddpb-answer" : ""}` }));
    return this.bodies.get(name);
  }

  drawPanel() {
    const name = this.chosen;
    const body = this.body(name);
    if (this.panel.firstChild !== body) this.panel.replaceChildren(body);
    if (name === "stack") this.drawStack(body);
    else if (name === "source") (body.source ??= new Source(body)).draw(this.state, (magic) => this.send({ kind: "do", magic }));
    else if (name === "variables") this.drawVariables(body);
    else if (name === "console") this.drawConsole(body);
    else if (name === "history") this.drawHistory(body);
    else this.drawAnswer(body, this.named.find(([each]) => each === name)[2]);
  }

  /** Of which run and when it is, and a button to ask again. */
  about(content, magic) {
    const when = content?.at && `${content.of ? `${content.of} · ` : ""}${content.at}`;
    return make("div", { class: "ddpb-about" }, make("code", {}, magic), when && make("span", {}, when),
      small({ onclick: () => this.watch() }, content ? "Refresh" : "Ask the ranks"));
  }

  // -- stacks

  drawStack(body) {
    const stack = this.fixed.length > 1 ? this.state("stack") : null;
    const locations = this.state("past") ? [] : this.state("locations") ?? [];
    const asked = stack && !this.state("past");
    show(body, [asked ? stack : locations, Boolean(asked), this.fixed.length], () => [
      this.fixed.length > 1 && this.about(asked && stack, "%ddp_where"),
      stack?.error && make("p", {}, stack.error),
      make("div", { class: "ddpb-sources" }, asked && !stack.error ? stack.classes.map(stackOf) : locations.map(sourceOf)),
      !asked && !locations.length && hint("No rank is waiting in a collective."),
    ]);
  }

  // -- variables

  drawVariables(body) {
    const table = this.state("variables");
    if (!body.firstChild) {
      const again = () => this.drawVariables(body);
      this.seek = make("input", { type: "search", placeholder: "find a name", "aria-label": "Find a variable", oninput: again });
      this.onlyOdd = make("input", { type: "checkbox", onchange: again, ...OWN_KEYS });
      body.append(make("div"), make("div", { class: "ddpb-about" }, this.seek, make("label", {}, this.onlyOdd, " only what differs ≠")), make("div"));
    }
    const [head, , tables] = body.children;
    show(head, [table?.at, table?.of], () => this.about(table, "%ddp_vars"));
    show(tables, [table, this.seek.value, this.onlyOdd.checked], () => {
      if (!table) return hint("Asking ranks…");
      if (table.error) return make("p", {}, table.error);
      const wanted = (row) => row.name.toLowerCase().includes(this.seek.value.toLowerCase()) && (row.differs || !this.onlyOdd.checked);
      const sections = table.sections.map((section) => ({ ...section, rows: section.rows.filter(wanted) })).filter(({ rows, left_out: more }) => rows.length || more);
      return [
        ...sections.map(variablesOf),
        !sections.length && hint(table.sections.some(({ rows }) => rows.length) ? "None of them." : "No variables are defined on the ranks yet."),
        ...table.notes.map((note) => hint(note)),
      ];
    });
  }

  // -- output

  drawConsole(body) {
    const output = this.state("console");
    if (!body.firstChild) {
      const again = () => this.drawConsole(body);
      this.search = make("input", { type: "search", placeholder: "search", "aria-label": "Search what ranks wrote", oninput: again });
      this.rank = make("select", { "aria-label": "Rank", onchange: again, ...OWN_KEYS });
      body.append(make("div", { class: "ddpb-about" }, this.rank, this.search, make("span", { role: "status" })), make("div"));
    }
    const [head, groups] = body.children;
    const ranks = Array.from({ length: this.state("board").world_size }, (_, rank) => String(rank));
    const chosen = this.rank.value || "all";
    show(this.rank, ranks, () => ["all", ...ranks].map((rank) => make("option", { value: rank, selected: rank === chosen }, rank === "all" ? "all ranks" : `rank ${rank}`)));
    const query = this.search.value;
    const wanted = (output?.groups ?? []).filter((group) => chosen === "all" || parseRanks(group.ranks).includes(Number(chosen)));
    const folded = new Set([...groups.querySelectorAll("details:not([open])")].map((each) => each.dataset.ranks));
    const atEnd = this.panel.scrollTop + this.panel.clientHeight > this.panel.scrollHeight - 30 || !groups.firstChild;
    const drawn = show(groups, [wanted, query, output?.notes, output?.title], () => {
      this.hits = 0;
      return [
        ...wanted.map((group) => this.outputOf(group, query, !folded.has(group.ranks))),
        !wanted.length && hint(output?.title ? `${output.title} wrote nothing.` : "Nothing has run yet."),
        ...(output?.notes ?? []).map((note) => hint(note)),
      ];
    });
    head.lastChild.textContent = query ? `${this.hits} line${this.hits === 1 ? "" : "s"}` : output?.title ?? "";
    if (drawn && atEnd) this.panel.scrollTop = this.panel.scrollHeight;
  }

  outputOf({ ranks, lines, left_out }, query, open) {
    const shown = lines.filter(([, text]) => !query || text.toLowerCase().includes(query.toLowerCase()));
    this.hits += shown.length;
    return make("details", { open, "data-ranks": ranks, class: "ddpb-output" },
      make("summary", {}, make("b", {}, nameRanks(ranks)), ` · ${shown.length} line${shown.length === 1 ? "" : "s"}`, left_out > 0 && ` · ${left_out} above are left out: %ddp_output --ranks ${parseRanks(ranks)[0]}`),
      make("pre", {}, shown.map(([kind, text]) => make("div", { class: kind === "out" ? null : `ddpb-${kind}` }, text ? found(text, query).map(([part, hit]) => (hit ? make("mark", {}, part) : part)) : " "))));
  }

  // -- runs and answers

  drawHistory(body) {
    const runs = this.state("history");
    show(body, runs ?? null, () =>
      runs?.length
        ? make("table", {},
            make("thead", {}, make("tr", {}, ["", "run", "began", "took", "outcome", "problem"].map((word) => make("th", { scope: "col" }, word)))),
            make("tbody", {}, runs.map((run) =>
              make("tr", { class: run.ok || run.running ? "" : "ddpb-bad" },
                make("td", { "aria-hidden": "true" }, run.running ? "▶" : run.ok ? "✓" : "✗"),
                make("th", { scope: "row" }, run.title, make("small", {}, ` on ${nameRanks(run.ranks)}`)),
                make("td", {}, run.began), make("td", {}, run.running ? "" : formatSpan(run.us)), make("td", { class: "ddpb-long" }, run.how),
                make("td", { class: "ddpb-long" }, run.headline, " ", run.category && make("span", { class: "ddpb-category" }, run.category)))))) 
        : hint(runs ? "Nothing has run yet." : "…"));
  }

  drawAnswer(body, answer) {
    show(body, answer, () => [
      make("div", { class: `ddpb-about${answer.ok ? "" : " ddpb-bad"}` },
        make("code", {}, answer.magic), answer.ok ? "" : make("b", {}, "did not work"),
        make("span", {}, [answer.of, answer.at].filter(Boolean).join(" · ")),
        answer.old && make("span", { class: "ddpb-category" }, "outdated: a newer run has started"),
        copyButton(answer.text, "the answer"),
        small({ "aria-label": `Close ${labelOf(answer.magic)}`, onclick: () => this.close(answer.number) }, "× Close")),
      make("pre", { class: answer.old ? "ddpb-old" : "" }, answer.text),
    ]);
  }
}

// ---- what is in them

/** The lines in which ranks wait, as the kernel knows them without asking. */
function sourceOf({ ranks, call_site, callers, lines, line }) {
  const source = lines.find(([number]) => number === line)?.[1];
  return make("figure", { class: "ddpb-source" },
    make("figcaption", {}, make("b", {}, nameRanks(ranks)), " at ", siteLink(call_site, source)),
    callers.length > 0 && make("div", { class: "ddpb-callers" }, `from ${callers.join(" → ")}`),
    codeAround(lines, line));
}

/** The stack of ranks that have the same, the outermost frame first. */
function stackOf({ ranks, state, frames }) {
  const parts = [];
  const innermost = frames.findLast((frame) => !frame.library);
  for (let i = 0; i < frames.length; i++) {
    let end = i;
    while (end < frames.length && frames[end].library) end++;
    if (end > i) {
      parts.push(make("details", {}, make("summary", {}, `${end - i} frame${end - i === 1 ? "" : "s"} of libraries`),
        frames.slice(i, end).map(({ at, function: name }) => make("div", { class: "ddpb-library" }, `${at}  ${name}`))));
      i = end - 1;
      continue;
    }
    const frame = frames[i];
    parts.push(make("div", { class: "ddpb-frame" }, frame.at && siteLink(frame.at, frame.source, frame.file), make("span", {}, frame.function), (frame !== innermost || !frame.around.length) && make("code", {}, frame.source), codeAround(frame.around, frame.line, frame !== innermost)));
  }
  return make("figure", { class: "ddpb-source" }, make("figcaption", { title: state }, make("b", {}, nameRanks(ranks)), ` ${state}`), parts);
}

/** Variables by name, with a column for each rank; of many ranks, a line for each value. */
function variablesOf({ title, ranks: text, rows, left_out }) {
  const ranks = parseRanks(text);
  const wide = ranks.length > MOST_COLUMNS;
  const words = ({ text: value, note, absent }) => [absent ? "—" : value, note && make("small", {}, note)];
  const cell = (value, attributes) => make("td", { class: value.odd ? "ddpb-odd" : null, title: value.text, ...attributes }, words(value));
  const head = (row, count = 1) => make("th", { scope: "row", rowspan: count, title: row.summary }, row.name, row.differs && make("b", { class: "ddpb-differs", title: row.summary }, " ≠"), row.summary && make("small", {}, row.summary));
  const lines = (row) => wide
    ? row.cells.map((value, i) => make("tr", {}, i === 0 && head(row, row.cells.length), make("td", {}, nameRanks(value.ranks)), cell(value)))
    : make("tr", {}, head(row), spans(ranks, row.cells).map(([, count, value]) => cell(value, { colspan: count })));
  return make("table", {},
    make("caption", {}, `${title[0].toUpperCase()}${title.slice(1)}`, wide && `, ${nameRanks(text)}`),
    make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "name"), (wide ? ["ranks", "value"] : ranks.map((rank) => `rank ${rank}`)).map((word) => make("th", { scope: "col" }, word)))),
    make("tbody", {}, rows.map(lines).flat(), left_out > 0 && make("tr", {}, make("td", { colspan: "9" }, `${left_out} more are left out: %ddp_vars NAME`))));
}
