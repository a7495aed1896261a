// The live board in the page: what stands where, and when it is drawn. No build step, nothing to load,
// no innerHTML: whatever a rank prints, names or raises is put into the page as text.

const LOST_AFTER_MS = 10_000; // a kernel sends something every two seconds while it is busy or watched
const ASK_AFTER_MS = 4_000; // an idle one that knows of no page is asked first
const SLEPT_MS = 5_000; // between two looks: the page slept, and knows nothing of that time
const HERE_EVERY_MS = 60_000;

const ENDED = "These ranks ended with their kernel. Run this cell again.";
const SAVED = "This board was saved. Its ranks are not connected with this page. For live ones run this cell again.";

class Page {
  /** `guarded` runs what is drawn later, while the page exists. */
  constructor(model, store, guarded) {
    this.model = model;
    this.store = store;
    this.guarded = guarded;
    this.view = crypto.randomUUID?.() ?? String(Math.random());
    this.chosen = new Set();
    this.past = null;
    this.messageAt = this.tickAt = performance.now();
    this.hereAt = -Infinity;
    this.el = make("div", { class: "ddpb", role: "region", "aria-label": "Board of the ranks" });
    const part = (name, attributes = {}) => {
      this[name] = make(attributes.tag ?? "div", { class: `ddpb-${name}`, ...attributes, tag: null });
      return this[name];
    };
    this.timeline = new Timeline(this);
    this.el.append(
      make("style", {}, `.ddp-still-${model.get("still")}, .jp-OutputArea-child:has(.ddp-still-${model.get("still")}) { display: none }`),
      part("head"),
      part("gone", { role: "status" }),
      part("loading", { hidden: true }),
      part("findings", { role: "status" }),
      part("benchmark"),
      part("actions", { role: "toolbar", "aria-label": "What can be done" }),
      part("rows", { role: "list", "aria-label": "Ranks" }),
      this.timeline.el,
      part("tabs"),
      part("notes", { tag: "ul" }),
    );
  }

  get board() {
    return this.past ?? this.get("board");
  }

  /** A part of the state: as it is told now, else as the notebook has it of the end of the cell. */
  get(name) {
    return this.store.state?.[name] ?? this.model.get(name);
  }

  /** Microseconds since the session's epoch; those of the last drawing where no kernel answers. */
  now() {
    const board = this.get("board");
    if (this.past) return this.past.now;
    if (board.frozen || this.store.ahead == null || this.disconnected) return Math.max(board.now ?? 0, this.store.heard ?? 0);
    return performance.now() * 1000 + this.store.ahead;
  }

  /** Jupyter marks a widget so whose kernel has ended or was restarted. */
  get disconnected() {
    return Boolean(this.store.cut || this.el.closest(".jupyter-widgets-disconnected"));
  }

  /** Nothing is ready whose kernel has ended. */
  look(row) {
    return lookOf(this.wasEnded && this.store.live && row.status !== "dead" ? { role: "ended" } : row);
  }

  received(now) {
    this.store.cut = false;
    this.store.live = true; // a kernel has spoken: this is no saved page
    this.messageAt = performance.now();
    if (now == null) return;
    this.store.heard = Math.max(this.store.heard ?? 0, now);
    this.store.ahead = Math.max(this.store.ahead ?? -Infinity, now - performance.now() * 1000);
  }

  send(message) {
    try {
      if (!this.disconnected) this.model.send({ ...message, view: this.view });
    } catch {
      this.store.cut = true; // a restart of the kernel closes the way to it, and is not always marked
    }
  }

  act(magic) {
    this.send({ kind: "do", magic });
  }

  draw() {
    const board = this.board;
    this.drawHead(board);
    this.drawFindings(this.past ? [] : this.get("findings"));
    this.drawBenchmark(this.past ? {} : this.get("benchmark"));
    this.drawRows(board);
    this.drawActions();
    drawTabs(this.tabs, (name) => (name === "past" ? this.past : this.get(name)), (message) => this.send(message));
    show(this.notes, board.notes, () => board.notes.map((note) => make("li", {}, note)));
    this.tick();
    this.timeline.touch();
  }

  drawHead(board) {
    const past = this.past && `${formatSpan(this.get("board").now - this.past.now)} ago`;
    show(this.head, [board.headline, past, board.closed, this.wasEnded], () => [
      make("span", { class: "ddpb-title" }, board.headline),
      (board.closed || this.wasEnded) && make("span", { class: "ddpb-category" }, "last known state"),
      past && make("button", { class: "ddpb-small ddpb-past", type: "button", onclick: () => this.timeline.goLive() }, `as it was ${past} · back`),
    ]);
  }

  /** What the user has unfolded stays so when findings change, or vanish for a moment. */
  drawFindings(findings) {
    if (this.findings.firstChild) this.unfolded = this.findings.querySelector("[open]");
    const drawn = show(this.findings, findings, () => findings.map((finding, i) => this.finding(finding, i === 0)));
    if (drawn && this.unfolded) this.findings.querySelector("details")?.setAttribute("open", "");
  }

  finding(finding, first) {
    const remedy = make("div", { class: "ddpb-remedy" }, make("code", {}, finding.remedy), copyButton(finding.remedy, "what to do"));
    for (const magic of finding.magics)
      remedy.append(make("button", { class: "ddpb-small ddpb-run", type: "button", onclick: () => this.act(magic) }, "Run ", make("code", {}, magic)));
    return make(
      first ? "section" : "details",
      { class: `ddpb-finding ddpb-${finding.passing ? "warn" : "bad"}` },
      make(
        first ? "div" : "summary",
        { class: "ddpb-sentence" },
        make("span", { class: "ddpb-mark", "aria-hidden": "true" }, finding.symbol),
        make("b", {}, finding.sentence),
        " ",
        make("span", { class: "ddpb-category" }, finding.passing ? "busy, not stuck" : finding.category),
      ),
      finding.waiting && make("div", { class: "ddpb-waiting" }, finding.waiting),
      make("div", { class: "ddpb-todo" }, "What to do"),
      remedy,
      finding.evidence.length > 0 &&
        make("details", { class: "ddpb-evidence" }, make("summary", {}, `Evidence (${finding.evidence.length})`), make("ul", {}, finding.evidence.map((fact) => make("li", {}, fact)))),
    );
  }

  /** The running benchmark. Its bar stays the same element, so that it moves. */
  drawBenchmark({ what, percent }) {
    show(this.benchmark, what ?? "", () => what && [make("b", {}, `%ddp_bench runs: ${what}`), make("progress", { max: "100", "aria-label": "Benchmark" }), make("span")]);
    if (!what) return;
    this.benchmark.querySelector("progress").value = percent;
    this.benchmark.lastChild.textContent = `${percent} %`;
  }

  // -- rows

  drawRows(board) {
    const dense = board.rows.length > 16;
    this.rows.classList.toggle("ddpb-dense", dense);
    const drawn = show(this.rows, [board.rows, board.left_out, [...this.chosen], this.wasEnded], () => {
      this.ages = [];
      const widest = Math.max(...board.rows.map(({ ranks, count }) => ranks.length + (count > 2 ? 4 : 0)), 1);
      this.rows.style.setProperty("--ddpb-first", `calc(${Math.min(widest, 18)}ch + 26px)`);
      this.wires = make("svg", { class: "ddpb-wires", "aria-hidden": "true" });
      const rows = board.rows.map((row) => this.row(row, this.model.get("stages")));
      const more = board.left_out && make("div", { class: "ddpb-more" }, `and ${nameRanks(board.left_out)}`);
      return [this.wires, ...rows, more];
    });
    if (drawn) requestAnimationFrame(() => this.guarded(() => this.drawWires()));
  }

  row(row, stages) {
    const { mark, word, tone } = this.look(row);
    const ranks = parseRanks(row.ranks);
    const chosen = ranks.every((rank) => this.chosen.has(rank));
    const age = make("span", { class: "ddpb-age" });
    if (row.since_us || row.heard_us) this.ages.push([age, row]);
    const pick = () => {
      ranks.forEach((rank) => (chosen ? this.chosen.delete(rank) : this.chosen.add(rank)));
      this.drawRows(this.board);
      this.drawActions();
      this.rows.querySelector(`[data-first="${row.first}"]`)?.focus();
    };
    const strip = stages.map((stage, i) => {
      const state = i + 1 <= row.stages_passed ? "passed" : i + 1 === row.entering ? (row.gone ? "failed" : "entering") : "to come";
      return make("i", { class: `ddpb-${state.replace(" ", "-")}`, title: `${i + 1} ${stage.name}: ${state}. ${stage.about}` });
    });
    const now = stages[(row.entering || row.stages_passed) - 1]?.name ?? "not launched";
    return make(
      "div",
      { class: `ddpb-row ddpb-${tone}`, role: "listitem", title: row.process },
      make(
        "button",
        { class: "ddpb-ranks", type: "button", "data-first": row.first, "aria-pressed": String(chosen), title: "Choose for Step, Where and Restart", "aria-label": `Choose ${nameRanks(row.ranks)}`, onclick: pick },
        row.ranks,
        row.count > 2 && make("small", {}, ` ×${row.count}`),
      ),
      make("span", { class: "ddpb-chip" }, make("span", { class: "ddpb-mark", "aria-hidden": "true" }, mark), word),
      make("span", { class: "ddpb-strip", role: "img", "aria-label": `stage ${row.stages_passed} of ${stages.length}: ${now}` }, strip),
      make("span", { class: "ddpb-doing" }, row.text || (row.entering ? now : "")),
      make("span", { class: "ddpb-for" }, row.waits_for && `waits for ${nameRanks(row.waits_for)}`),
      age,
    );
  }

  /** Brackets from those that wait to those they wait for. */
  drawWires() {
    const rows = [...this.rows.querySelectorAll(".ddpb-row")];
    const waits = brackets(this.board.rows).slice(0, 4);
    this.rows.style.setProperty("--ddpb-gutter", waits.length ? `${10 + 7 * waits.length}px` : "0px");
    const middle = (row) => rows[row].offsetTop + rows[row].offsetHeight / 2;
    const edge = 8 + 7 * waits.length;
    const paths = waits.flatMap(({ from, to }, i) => {
      const x = edge - 7 * (i + 1);
      const ends = [...from, ...to].map(middle);
      const line = `M${x} ${Math.min(...ends)}V${Math.max(...ends)}`;
      const stubs = from.map((row) => `M${x} ${middle(row)}H${edge}`).join("");
      const heads = to.map((row) => `M${x} ${middle(row)}H${edge}m-5 -4l5 4l-5 4`).join("");
      return [make("path", { d: line + stubs }), make("path", { class: "ddpb-head-of", d: heads })];
    });
    this.wires.setAttribute("height", this.rows.scrollHeight);
    this.wires.replaceChildren(...paths);
  }

  /** torch is being loaded. Its bar stays the same element, so that it moves. */
  drawLoading(loading, now) {
    this.loading.hidden = !loading;
    if (!loading) return;
    const bar = this.loading.firstChild ?? make("progress", { max: "100", "aria-label": "Loading torch" });
    if (!bar.parentNode) this.loading.append(bar, make("span"));
    if (loading.percent) bar.value = loading.percent;
    const share = loading.percent ? `about ${loading.percent} %, ` : "";
    this.loading.lastChild.textContent = `Loading torch, once for all ranks: ${share}${formatAge(now - loading.since_us)}`;
  }

  /** What changes by itself: ages, and whether a kernel is there. */
  tick() {
    const now = this.now();
    const [time, frozen] = [performance.now(), this.get("board").frozen];
    const ended = this.disconnected;
    if (document.hidden || time - this.tickAt > SLEPT_MS) [this.messageAt, this.hereAt] = [time, -Infinity];
    this.tickAt = time;
    const quietMs = time - this.messageAt;
    if (!frozen && !ended && !document.hidden && time - this.hereAt > (quietMs > ASK_AFTER_MS ? ASK_AFTER_MS : HERE_EVERY_MS)) {
      this.hereAt = time;
      this.send({ kind: "here" });
    }
    const lost = !frozen && !ended && quietMs > LOST_AFTER_MS;
    this.el.classList.toggle("ddpb-lost", lost);
    this.el.classList.toggle("ddpb-ended", ended);
    const why = ended ? (this.store.live ? ENDED : SAVED) : lost ? `The kernel has not responded for ${formatAge(quietMs * 1000)}. This is the last known state.` : "";
    if (this.gone.textContent !== why) this.gone.textContent = why;
    if (ended !== this.wasEnded) {
      this.wasEnded = ended;
      this.drawHead(this.board);
      this.drawRows(this.board);
      this.timeline.touch();
    }
    this.drawLoading(this.board.loading, now);
    for (const [element, { heard_us, since_us }] of this.ages ?? []) {
      const text = heard_us ? `silent ${formatAge(now - heard_us)}` : formatAge(Math.max(0, now - since_us));
      if (element.textContent !== text) element.textContent = text;
    }
  }

  // -- actions

  drawActions() {
    const actions = this.past ? [] : this.get("actions");
    const busy = this.get("busy");
    const key = [actions, busy, [...this.chosen]];
    const focused = this.actions.contains(document.activeElement) && document.activeElement.dataset.name;
    show(this.actions, key, () => [
      ...actions.map((action) => this.action(action, busy)),
      actions.length > 0 &&
        make(
          "span",
          { class: "ddpb-chosen" },
          this.chosen.size ? `for ${nameRanks(formatRanks(this.chosen))} ` : "for all ranks",
          this.chosen.size > 0 && make("button", { class: "ddpb-small", type: "button", onclick: () => this.choose([]) }, "all"),
        ),
    ]);
    if (focused) this.actions.querySelector(`[data-name="${focused}"]`)?.focus();
  }

  choose(ranks) {
    this.chosen = new Set(ranks);
    this.drawRows(this.board);
    this.drawActions();
  }

  action(action, busy) {
    const magic = magicFor(action, this.chosen);
    const enough = action.name === "restart" && this.chosen.size > 0;
    const working = busy.includes(magic);
    const whyNot = working ? "running" : enough ? "" : action.why_not;
    return make(
      "button",
      {
        class: "ddpb-action",
        type: "button",
        "data-name": action.name,
        "aria-disabled": String(Boolean(whyNot)),
        title: whyNot ? `${magic}: ${whyNot}` : magic,
        onclick: () => whyNot || this.act(magic),
      },
      make("span", {}, working ? `${action.label} …` : action.label),
      make("code", {}, magic),
    );
  }
}
