// Below the ranks, in one place of fixed height: tabs for what is wrong, the code, variables, output and
// runs. The kernel is asked for what is open, and tells when it changes.

const TABS = [["problem", "Problem"], ["code", "Code"], ["variables", "Variables"], ["output", "Output"], ["history", "History"]];
/** On what has the focus: keys pressed there are not the notebook's, where an arrow goes to the next cell. */
const OWN_KEYS = { "data-lm-suppress-shortcuts": "true" };
const MOST_COLUMNS = 8; // of ranks beside each other; more are written below each other

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

/** Which tab shows a new answer: that of what moved ranks is seen by their rows, unless it did not work. */
export const tabOf = ({ magic, ok }) => (!ok ? "problem" : /^%ddp_(step|abort|restart|break)/.test(magic) ? "" : magic === "%ddp_where" ? "code" : "problem");

const codeAround = (lines, line, hidden) =>
  lines.length > 0 &&
  make("pre", { hidden }, lines.map(([number, text]) => make("div", { class: number === line ? "ddpb-here" : "" }, `${number === line ? "▸" : " "}${String(number).padStart(4)}  ${text}`)));

// ---- the tabs

class Tabs {
  constructor(page) {
    this.page = page;
    this.send = (message) => page.send(message);
    this.chosen = "problem";
    this.closed = new Set();
    this.id = `ddpb-${Math.random().toString(36).slice(2)}`;
    this.bodies = new Map();
    this.list = make("div", { class: "ddpb-tablist", role: "tablist", "aria-label": "More about the ranks", onkeydown: (e) => this.key(e) });
    this.fold = small({ class: "ddpb-small ddpb-fold", "aria-expanded": "true", "aria-label": "Show what is below", ...OWN_KEYS, onclick: () => this.folded(!this.el.classList.contains("ddpb-shut")) }, "▾");
    this.panel = make("div", { class: "ddpb-panel", role: "tabpanel", id: `${this.id}-panel`, tabindex: "0", ...OWN_KEYS });
    this.el = make("div", { class: "ddpb-tabs" }, make("div", { class: "ddpb-tabbar" }, this.list, this.fold), page.notice, this.panel);
    this.body("problem").append(...page.problem);
  }

  folded(shut) {
    this.el.classList.toggle("ddpb-shut", shut);
    this.fold.setAttribute("aria-expanded", String(!shut));
    this.fold.textContent = shut ? "▸" : "▾";
  }

  draw(state) {
    this.state = state;
    const { frozen, aside } = state("board");
    this.fixed = TABS.slice(0, aside ? 1 : frozen ? 2 : 5);
    const answers = state("answers") ?? [];
    const newest = answers.reduce((one, other) => (other.number > one.number ? other : one), { number: 0, magic: "", ok: true });
    const isNew = this.newest != null && newest.number > this.newest;
    this.newest = Math.max(this.newest ?? 0, newest.number);
    // The tab follows the state, and a new finding; until then the user's own choice holds.
    const { state: now } = this.page;
    const key = [now, state("past") ? "" : state("findings")[0]?.sentence].join();
    if (key !== this.followed) {
      this.followed = key;
      if (["hang", "error", "paused"].includes(now)) this.grow();
      this.choose(SESSION[now][1]);
    }
    if (isNew && tabOf(newest)) this.choose(tabOf(newest));
    if (isNew && newest.magic === "%ddp_why") this.panel.querySelector(".ddpb-evidence")?.setAttribute("open", "");
    if (!this.known(this.chosen)) this.chosen = "problem";
    this.drawList();
    this.drawPanel();
  }

  /** In a cell, what is wrong and the code get more room, once: what moved the page would do so again. */
  grow() {
    this.el.classList.add("ddpb-tall");
  }

  known(name) {
    return this.fixed.some(([each]) => each === name);
  }

  /** Open a tab. The kernel is told, and tells what is in it until another is opened. */
  choose(name, focus = false) {
    this.chosen = this.known(name) ? name : "problem";
    this.drawList();
    this.drawPanel();
    this.watch();
    if (focus) this.focusTab();
  }

  focusTab() {
    this.list.querySelector("[aria-selected=true]")?.focus();
  }

  watch() {
    this.send({ kind: "watch", tab: this.fixed.length > 2 ? this.chosen : "" });
  }

  close(number) {
    this.closed.add(number);
    this.send({ kind: "close", number });
    this.page.draw();
    this.focusTab();
  }

  key(event) {
    const names = this.fixed.map(([name]) => name);
    const at = names.indexOf(this.chosen);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: names.length - 1 }[event.key];
    if (to == null) return;
    this.choose(names.at(to % names.length), true);
    event.preventDefault();
    event.stopPropagation();
  }

  drawList() {
    const focused = this.list.contains(document.activeElement);
    const drawn = show(this.list, [this.fixed.length, this.chosen], () =>
      this.fixed.map(([name, label]) => {
        const chosen = name === this.chosen;
        return make("button", {
          class: "ddpb-tab", type: "button", role: "tab", id: `${this.id}-${name}`, "aria-selected": String(chosen), "aria-controls": `${this.id}-panel`, tabindex: chosen ? "0" : "-1",
          onclick: () => (this.folded(false), this.grow(), this.choose(name)), ...OWN_KEYS,
        }, label);
      }),
    );
    if (drawn && focused) this.focusTab();
    this.panel.setAttribute("aria-labelledby", `${this.id}-${this.chosen}`);
  }

  /** The element that a tab draws into; it stays, with what was typed and unfolded in it. */
  body(name) {
    if (!this.bodies.has(name)) this.bodies.set(name, make("div", { class: `ddpb-in-${name}` }));
    return this.bodies.get(name);
  }

  drawPanel() {
    const name = this.chosen;
    const body = this.body(name);
    if (this.panel.firstChild !== body) this.panel.replaceChildren(body);
    if (name === "code") this.drawCode(body);
    else if (name === "variables") this.drawVariables(body);
    else if (name === "output") this.drawOutput(body);
    else if (name === "history") this.drawHistory(body);
  }

  /** Of which run and when it is, and a button to ask again. */
  about(content, magic) {
    const when = content?.at && `${content.of ? `${content.of} · ` : ""}${content.at}`;
    return make("div", { class: "ddpb-about" }, make("code", {}, magic), when && make("span", {}, when),
      small({ onclick: () => this.watch() }, content ? "Refresh" : "Ask the ranks"));
  }

  // -- code: where ranks are paused, else where they are

  drawCode(body) {
    if (!body.firstChild) {
      this.source = new Source(this.page, (magic) => this.send({ kind: "do", magic }));
      this.stack = make("div");
      body.append(this.source.el, this.stack);
    }
    const stops = this.state("past") ? {} : this.state("stops");
    const paused = Boolean(stops.files?.length || (isMoving(this.state) && !this.source.el.hidden && this.source.code.firstChild));
    [this.source.el.hidden, this.stack.hidden] = [!paused, paused];
    if (paused) this.source.draw(this.state, stops);
    else this.drawStack(this.stack);
  }

  drawStack(body) {
    const live = this.fixed.length > 2 && !this.state("past");
    const stack = live ? this.state("stack") : null;
    const locations = this.state("locations") ?? [];
    show(body, [stack ?? locations, live], () => [
      live && this.about(stack, "%ddp_where"),
      stack?.error && make("p", {}, stack.error),
      make("div", { class: "ddpb-sources" }, stack && !stack.error ? stack.classes.map(stackOf) : locations.map(sourceOf)),
      !stack && !locations.length && hint("No rank is waiting in a collective."),
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
    show(tables, [table, this.seek.value, this.onlyOdd.checked, this.page.get("board").run], () => {
      if (!table) return hint("Asking ranks…");
      if (table.error) return make("p", {}, table.error);
      const wanted = (row) => row.name.toLowerCase().includes(this.seek.value.toLowerCase()) && (row.differs || !this.onlyOdd.checked);
      const sections = table.sections.map((section) => ({ ...section, rows: section.rows.filter(wanted) })).filter(({ rows, left_out: more }) => rows.length || more);
      return [
        ...sections.map((section) => variablesOf(section)),
        !sections.length && (table.sections.some(({ rows }) => rows.length) ? hint("None of them.") : this.page.get("board").run ? hint("No variables are defined on the ranks yet.") : starters(this.page.el)),
        ...table.notes.map((note) => hint(note)),
      ];
    });
  }

  // -- output

  drawOutput(body) {
    const output = this.state("console");
    if (!body.firstChild) {
      const again = () => this.drawOutput(body);
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

  answer(answer) {
    return make("section", { class: "ddpb-answer" },
      make("div", { class: `ddpb-about${answer.ok ? "" : " ddpb-bad"}` },
        make("code", {}, answer.magic), answer.ok ? "" : make("b", {}, "did not work"),
        make("span", {}, [answer.of, answer.at].filter(Boolean).join(" · ")),
        answer.old && make("span", { class: "ddpb-category" }, "outdated: a newer run has started"),
        copyButton(answer.text, "the answer"),
        small({ "aria-label": `Close the answer of ${answer.magic}`, onclick: () => this.close(answer.number) }, "× Close")),
      make("div", { class: answer.old ? "ddpb-old" : "" }, answer.nodes?.length ? answer.nodes.map(nodeOf) : make("pre", {}, answer.text)));
  }
}

// ---- what is in them

const ANSWER = "b br code details div li ol p pre small span strong summary table tbody td th thead tr ul".split(" ");

/** An element of an answer, which the kernel sends as lists: of these kinds, and its text stays text. */
const nodeOf = (node) => (typeof node === "string" ? node : make(ANSWER.includes(node[0]) ? node[0] : "span", Object.fromEntries(Object.entries(node[1]).filter(([name]) => ["colspan", "rowspan", "scope"].includes(name))), node[2].map(nodeOf)));

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

/** What the values of a row share, as `float32 [4, 8] cpu`, and what is left of each: a number, if that says it. */
export function shared(cells) {
  const parts = cells.filter(({ absent }) => !absent).map(({ text }) => /^(\w+ \[[\d, ]*\] \w+(?::\d+)?)[:,] (?:(mean) (\S+?)(?:,.*)?|(.*))$/.exec(text) ?? []);
  const [, kind, mean] = parts[0] ?? [];
  if (!kind || parts.some((part) => part[1] !== kind || part[2] !== mean)) return ["", cells.map(({ text }) => text)];
  return [`${kind}${mean ? ", mean" : ""}`, cells.map(({ absent }) => (absent ? "" : (([, , , number, rest]) => number ?? rest)(parts.shift())))];
}

/** Variables by name, with a column for each rank; of many ranks, a line for each value. `set` changes one. */
function variablesOf({ title, ranks: text, rows, left_out }, set = null) {
  const ranks = parseRanks(text);
  const wide = ranks.length > MOST_COLUMNS;
  const head = (row, kind, count = 1) => make("th", { scope: "row", rowspan: count, title: row.summary }, row.name, row.differs && make("b", { class: "ddpb-differs", title: row.summary }, " ≠"), kind && make("small", {}, ` ${kind}`));
  const lines = (row) => {
    const [kind, words] = shared(row.cells);
    // How far it is along from the least to the greatest, as a bar behind the number.
    const numbers = words.map((each) => (each === "" ? NaN : Number(each)));
    const [least, most] = [Math.min(...numbers), Math.max(...numbers)];
    const cell = (value, attributes) => {
      const at = row.cells.indexOf(value);
      const share = most > least ? `--ddpb-share: ${Math.round((100 * (numbers[at] - least)) / (most - least))}%` : null;
      return make("td", { class: [value.odd && "ddpb-odd", share && "ddpb-number"].filter(Boolean).join(" "), style: share, title: value.text + (set ? ". Double click: change it" : ""), ondblclick: () => set?.(row.name, kind ? row.name : value.text), ...attributes }, value.absent ? "—" : words[at], value.note && make("small", {}, value.note));
    };
    return wide
      ? row.cells.map((value, i) => make("tr", {}, i === 0 && head(row, kind, row.cells.length), make("td", {}, nameRanks(value.ranks)), cell(value)))
      : make("tr", {}, head(row, kind), spans(ranks, row.cells).map(([, count, value]) => (value ? cell(value, { colspan: count }) : make("td", { colspan: count }))));
  };
  return make("table", {},
    make("caption", {}, `${title[0].toUpperCase()}${title.slice(1)}`, wide && `, ${nameRanks(text)}`),
    make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "name"), (wide ? ["ranks", "value"] : ranks.map((rank) => `rank ${rank}`)).map((word) => make("th", { scope: "col" }, word)))),
    make("tbody", {}, rows.map(lines).flat(), left_out > 0 && make("tr", {}, make("td", { colspan: "9" }, `${left_out} more are left out: %ddp_vars NAME`))));
}
