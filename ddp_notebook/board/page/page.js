// The live board in the page: what stands where, and when it is drawn. No build step, nothing to load,
// no innerHTML: whatever a rank prints, names or raises is put into the page as text.

// A kernel sends something every two seconds while it is busy or watched.
const LOST_AFTER_MS = 10_000;
const TAKEN_WITHIN_MS = 1500;
// An idle one that knows of no page is asked first.
const ASK_AFTER_MS = 4_000;
// Between two looks: the page slept, and knows nothing of that time.
const SLEPT_MS = 5_000;
const HERE_EVERY_MS = 60_000;

const ENDED = "These ranks ended with their kernel. For new ones: %load_ext ddp_notebook, then %ddp_init";
const SAVED = "This board was saved; its ranks are not connected to this page. For live ones run this cell again.";

/** `asked` is what was asked last, and when: of what the kernel has not taken in since, that it waits. */
export const waitsFor = (asked, now) =>
  asked && now - asked[1] > TAKEN_WITHIN_MS ? `The notebook is running a cell without %%ddp; ${asked[0]} follows when it is over.` : "";

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
    const others = document.querySelectorAll(".ddpb").length;
    const still = model.get("still");
    this.el = make("div", { class: `ddpb ddpb-of-${still}${model.get("in_panel") ? " ddpb-late" : ""}`, role: "region", "aria-label": `Board of the ranks${others ? ` ${others + 1}` : ""}`, "data-notebook": model.get("notebook") });
    const part = (name, attributes = {}) => {
      this[name] = make(attributes.tag ?? "div", { class: `ddpb-${name}`, ...attributes, tag: null });
      return this[name];
    };
    part("rows", { role: "list", "aria-label": "Ranks" });
    this.timeline = new Timeline(this, this.rows);
    this.legend = this.timeline.el.querySelector(".ddpb-legend");
    this.timeline.canvas.parentElement.parentElement.append(part("walk", { hidden: true, role: "img" }));
    this.toolbar = new Toolbar(this);
    this.clock = make("span", { class: "ddpb-clock" });
    this.notice = [part("gone", { role: "status" }), part("loading"), part("benchmark")];
    this.problem = [part("findings", { role: "status" }), part("todo", { tag: "ul" }), part("calm"), part("answers")];
    this.moved = make("div", { class: `ddpb-moved-${still}` }, "The board is beside the notebook. To have it here: ", make("code", {}, "%ddp_board --here"));
    this.tabs = new Tabs(this);
    this.el.append(
      make("style", {}, `.ddp-still-${still}, .jp-OutputArea-child:has(.ddp-still-${still}), body:has(.jupyterlab-sidecar .ddpb-of-${still}) .jp-Cell .ddpb-of-${still}, body:not(:has(.jupyterlab-sidecar .ddpb-of-${still})) .ddpb-moved-${still}, .jupyterlab-sidecar .ddpb-moved-${still} { display: none }`),
      part("head"),
      this.toolbar.el,
      this.timeline.el,
      this.tabs.el,
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

  askForAll() {
    this.store.askedAt = performance.now();
    this.send({ kind: "hello" });
  }

  act(magic) {
    this.asked = [magic, performance.now()];
    this.send({ kind: "do", magic });
  }

  draw() {
    if (!this.el.offsetParent) return; // hidden: drawn when a ResizeObserver reports that it is not
    const board = this.board;
    const findings = this.past ? (this.past.findings ?? []) : this.get("findings");
    this.state = board.closed || this.wasEnded ? "ended" : stateOf(board, findings, this.model.get("stages").length);
    // A board that was replaced leaves one line; so does one of ended ranks of which there is nothing to tell.
    const line = Boolean(board.closed) && !(board.ended && findings.length);
    this.el.classList.toggle("ddpb-line", line && !this.opened);
    this.drawHead(board, findings, line);
    this.drawProblem(board, findings);
    this.drawBenchmark(this.past ? {} : this.get("benchmark"));
    this.drawRows(board);
    this.drawActions();
    this.tick();
    this.timeline.touch();
  }

  /** The state, for a glance: its colour fills the bar, whose place and height are always the same. */
  drawHead(board, findings, line) {
    const { state, chosen } = this;
    const past = this.past && `${formatSpan(this.get("board").now - this.past.now)} ago`;
    const about = this.get("board");
    const open = this.head.querySelector(".ddpb-notes")?.open;
    const [tone] = SESSION[state];
    this.head.className = `ddpb-head ddpb-${tone}`;
    const drawn = show(this.head, [state, line, this.opened, board.headline, board.what, board.run, past, [...chosen], about.notes, about.address, findings[0]?.sentence], () => [
      make("span", { class: "ddpb-title", title: board.headline },
        make("span", { role: "status" }, make("b", {}, state), findings.length > 0 && make("span", { class: "ddpb-heard" }, `: ${findings[0].sentence}`)),
        ` · ${[board.what || board.headline, board.run].filter(Boolean).join(" · ")}`),
      this.clock,
      state === "ended" && make("span", { class: "ddpb-category" }, "last known state"),
      line && make("button", { class: "ddpb-small", type: "button", "aria-expanded": String(Boolean(this.opened)), onclick: () => ((this.opened = !this.opened), this.draw()) }, this.opened ? "Fold" : "Show"),
      chosen.size > 0 && make("button", { class: "ddpb-small ddpb-pick", type: "button", "aria-label": `For ${nameRanks(formatRanks(chosen))} only. Press for all ranks`, onclick: () => this.choose([]) }, `for ${nameRanks(formatRanks(chosen))} ×`),
      past && make("button", { class: "ddpb-small ddpb-past", type: "button", onclick: () => this.timeline.goLive() }, `as it was ${past} · back`),
      aboutBoard(about, this.legend),
    ]);
    if (drawn && open) this.head.querySelector(".ddpb-notes").open = true;
  }

  /** What is wrong, and what is to be done; of setup, what comes next. */
  drawProblem(board, findings) {
    // What has moved ranks is seen by their rows, but in setup; what a finding says already stands in it.
    const wanted = (answer) => !this.tabs.closed.has(answer.number) && !(answer.magic === "%ddp_why" && answer.ok && findings.length) && (tabOf(answer) === "problem" || (!tabOf(answer) && this.state === "set-up"));
    const answers = this.past ? [] : (this.get("answers") ?? []).filter(wanted);
    drawFindings(this.findings, findings, (magic) => this.act(magic));
    show(this.answers, answers, () => answers.map((answer) => this.tabs.answer(answer)));
    const todo = board.todo ?? [];
    show(this.todo, todo, () => todo.map((note) => make("li", {}, note)));
    const { next } = board;
    const quiet = this.past ? "No problem had been found at that time." : board.checking ? "Checking results…" : board.frozen || this.wasEnded ? "No problem found." : "No problem found. If something goes wrong, it appears here; Why? asks every rank now.";
    const none = this.state === "set-up" && next ? [make("b", {}, `Next: ${next.stage}. `), next.about, next.values && make("div", {}, make("code", {}, next.values))] : [quiet];
    show(this.calm, [none.length, next, quiet, findings.length + todo.length + answers.length], () => (findings.length || todo.length || answers.length) && none.length < 2 ? [] : none);
  }

  /** The running benchmark. Its bar stays the same element, so that it moves. */
  drawBenchmark({ what, percent }) {
    show(this.benchmark, what ?? "", () => what && [make("b", {}, `%ddp_bench runs: ${what}`), make("progress", { max: "100", "aria-label": "Benchmark" }), make("span")]);
    if (!what) return;
    this.benchmark.querySelector("progress").value = percent;
    this.benchmark.lastChild.textContent = `${percent} %`;
  }

  // -- rows

  /** True where each rank has a row of its own: its timeline is in the row. */
  get inline() {
    const { rows, world_size } = this.board;
    return world_size <= RANKS_IN_ROWS && rows.length === world_size;
  }

  drawRows(board) {
    const stages = this.model.get("stages");
    this.rows.classList.toggle("ddpb-dense", board.rows.length > 16);
    this.timeline.el.classList.toggle("ddpb-folded", board.world_size > RANKS_IN_ROWS);
    show(this.rows, [board.rows, board.left_out, [...this.chosen], this.wasEnded], () => {
      this.ages = [];
      const widest = Math.max(...board.rows.map(({ ranks, count }) => ranks.length + (count > 2 ? 4 : 0)), 1);
      this.rows.style.setProperty("--ddpb-first", `calc(${Math.min(widest, 18)}ch + 14px)`);
      const more = board.left_out && make("div", { class: "ddpb-left-out" }, `and ${nameRanks(board.left_out)}`);
      return [...board.rows.map((row) => this.row(row)), more];
    });
    this.walk.hidden = this.state === "ended" || !board.rows.some((row) => row.stages_passed < stages.length);
    this.walk.style.setProperty("--ddpb-stages", stages.length);
    if (this.walk.hidden) return;
    show(this.walk, [board.rows, this.inline], () => stageWalk(board.rows, stages, this.inline));
    this.walk.setAttribute("aria-label", `Stages passed, of ${stages.length}: ${board.rows.map((row) => `${nameRanks(row.ranks)}: ${row.stages_passed}`).join("; ")}`);
  }

  row(row) {
    const ranks = parseRanks(row.ranks);
    const chosen = ranks.every((rank) => this.chosen.has(rank));
    const age = make("span", { class: "ddpb-age" });
    if (row.since_us || row.heard_us) this.ages.push([age, row]);
    const pick = () => {
      this.toggle(ranks);
      this.rows.querySelector(`[data-first="${row.first}"]`)?.focus();
    };
    return rankRow(row, { look: this.look(row), chosen, age, pick });
  }

  /** What changes by itself: ages, and whether a kernel is there. */
  tick() {
    const now = this.now();
    const [time, { frozen, aside }] = [performance.now(), this.get("board")];
    const ended = this.disconnected;
    if (document.hidden || time - this.tickAt > SLEPT_MS) [this.messageAt, this.hereAt] = [time, -Infinity];
    this.tickAt = time;
    const quietMs = time - this.messageAt;
    if (!frozen && !ended && !document.hidden && time - this.hereAt > (quietMs > ASK_AFTER_MS ? ASK_AFTER_MS : HERE_EVERY_MS)) {
      this.hereAt = time;
      this.send({ kind: "here" });
    }
    if (this.store.missed && time - this.store.askedAt > ASK_AFTER_MS) this.askForAll();
    const lost = !frozen && !ended && quietMs > LOST_AFTER_MS;
    this.el.classList.toggle("ddpb-lost", lost);
    this.el.classList.toggle("ddpb-ended", ended);
    this.el.classList.toggle("ddpb-aside", Boolean(aside) && !frozen);
    const quiet = `The kernel has not responded for ${formatAge(quietMs * 1000)}. This is the last known state.`;
    const side = this.el.closest(".jupyterlab-sidecar") ? " --board side" : "";
    const why = ended ? (this.store.live ? ENDED + side : SAVED) : lost ? quiet : waitsFor(this.asked, time);
    if (this.gone.textContent !== why) this.gone.textContent = why;
    if (ended !== this.wasEnded) {
      this.wasEnded = ended;
      this.draw();
    }
    if (ended) this.makeRoom();
    const { loading, run_us } = this.board;
    const load = loading ? `${loading.what}: ${formatAge(now - loading.since_us)}` : "";
    if (this.loading.textContent !== load) this.loading.textContent = load;
    const ran = run_us && this.state !== "ended" ? ` · ${formatAge(now - run_us)}` : "";
    if (this.clock.textContent !== ran) this.clock.textContent = ran;
    for (const [element, { heard_us, since_us }] of this.ages ?? []) {
      const text = heard_us ? `silent ${formatAge(now - heard_us)}` : formatAge(Math.max(0, now - since_us));
      if (element.textContent !== text) element.textContent = text;
    }
  }

  /** A panel of a saved notebook makes room, the cell has its board; of ended ranks, for the same notebook's new ones. */
  makeRoom() {
    const panel = this.el.closest(".jupyterlab-sidecar");
    const of = this.model.get("notebook");
    if (!panel || (this.store.live && !(of && document.querySelector(`.jupyterlab-sidecar .ddpb[data-notebook="${of}"]:not(.ddpb-ended)`)))) return;
    const close = document.querySelector(`.lm-TabBar-tab[data-id="${CSS.escape(panel.id)}"] .lm-TabBar-tabCloseIcon`);
    const { x = 0, y = 0 } = close?.getBoundingClientRect() ?? {};
    // JupyterLab looks where the pointer is, and knows no click.
    for (const type of ["pointerdown", "pointerup"]) close?.dispatchEvent(new PointerEvent(type, { bubbles: true, clientX: x + 3, clientY: y + 3 }));
  }

  // -- actions

  drawActions() {
    const { past } = this;
    this.toolbar.draw(past ? this.get("actions").map((each) => ({ ...each, why_not: "the board shows an earlier moment" })) : this.get("actions"), this.get("busy"));
    this.tabs.draw((name) => (name === "past" ? past : name === "locations" && past ? (past.locations ?? []) : this.get(name)));
  }

  /** A key steps wherever in this notebook the focus is, unless the front end takes it. */
  key(event) {
    const action = this.get("actions").find(({ name }) => name === stepOf(event));
    const moving = isMoving((name) => this.get(name));
    if (!action || event.defaultPrevented || this.past || !(moving || this.get("stops").files?.length)) return;
    // Jupyter takes a board that is far above out of the page.
    this.home = this.el.closest(".jp-NotebookPanel, body") ?? this.home;
    const seen = this.home?.checkVisibility?.() ?? true;
    if (!seen || !(event.target === document.body || this.home?.contains(event.target))) return;
    event.preventDefault();
    if (!moving && !action.why_not) this.act(magicFor(action, this.chosen));
  }

  toggle(ranks) {
    const all = ranks.every((rank) => this.chosen.has(rank));
    ranks.forEach((rank) => (all ? this.chosen.delete(rank) : this.chosen.add(rank)));
    this.choose(this.chosen);
  }

  choose(ranks) {
    this.chosen = new Set(ranks);
    this.draw();
  }
}

/** What is true of the session all the time, and what the marks mean: behind an (i). */
function aboutBoard(board, legend) {
  const notes = [...(board.address ? [`The ranks meet at ${board.address}`] : []), ...board.notes];
  const marks = Object.entries(STATES).map(([word, [mark, tone]]) => make("span", { class: `ddpb-${tone}` }, sign(mark), word));
  return make(
    "details",
    { class: "ddpb-notes", onkeydown: (event) => event.key === "Escape" && (event.currentTarget.open = false) },
    make("summary", { "aria-label": "Notes and marks", title: "Notes and marks" }, "i"),
    make("div", { class: "ddpb-popup" }, make("ul", {}, notes.map((note) => make("li", {}, note))), make("div", { class: "ddpb-marks" }, marks), legend),
  );
}

const RANKS_IN_ROWS = 7;
