// The timeline: slices on a canvas, what is pointed at, the time that is looked at.

/** The pattern that marks a wait, whatever the colours; `light` leans the other way. */
function hatch(colour, light = false) {
  const tile = new OffscreenCanvas(6, 6);
  const brush = tile.getContext("2d");
  brush.globalAlpha = light ? 0.08 : 0.28;
  brush.fillStyle = brush.strokeStyle = colour;
  brush.fillRect(0, 0, 6, 6);
  brush.globalAlpha = 1;
  brush.lineWidth = light ? 0.8 : 1.4;
  for (const shift of [-6, 0, 6]) {
    brush.moveTo(shift, light ? 0 : 6);
    brush.lineTo(shift + 6, light ? 6 : 0);
  }
  brush.stroke();
  return tile;
}

const ROW_HEIGHT = 24; // of a rank's row with its timeline in it; board.css has it, too
const LEAST_BAD = 5; // pixels: what failed at once is to be seen
const TONES = { all_reduce: "a", broadcast: "b", barrier: "c" };

class Timeline {
  /** `rows` is the element of the ranks' rows: where each rank has one, its timeline is in it. */
  constructor(page, rows) {
    this.page = page;
    this.window = new Window();
    this.at = null;
    this.now = 0; // when it was drawn last
    this.canvas = make("canvas", {
      tabindex: "0",
      role: "img",
      "data-lm-suppress-shortcuts": "true", // Notebook 7 would go to the next cell
      "aria-label": "Timeline of collectives. Arrow keys go from one to the next; plus and minus zoom.",
      onpointermove: (e) => this.move(e),
      onpointerleave: () => this.point(null),
      onpointerdown: (e) => this.grab(e),
      onlostpointercapture: () => (this.grabbed = null), // released, or taken over by a scroll
      ondblclick: () => this.fit(),
      onkeydown: (e) => this.key(e),
    });
    this.canvas.addEventListener("wheel", (e) => this.wheel(e), { passive: false });
    this.tip = make("div", { class: "ddpb-tip", role: "status", hidden: true });
    this.frameAt = make("div", { class: "ddpb-at", hidden: true });
    this.pause = this.button("Pause", () => (this.window.follow ? this.hold() : this.goLive()));
    this.slider = make("input", { type: "range", min: "0", max: "1000", value: "1000", "aria-label": "Time", "data-lm-suppress-shortcuts": "true", oninput: () => this.scrub() });
    this.info = make("span", { class: "ddpb-info" });
    const legend = [["a", "all_reduce"], ["b", "broadcast"], ["c", "barrier"], ["d", "other"], ["wait", "waits"], ["last", "last to arrive"], ["fail", "failed"], ["pause", "paused"], ["free", "freed"], ["at", "time shown"]];
    this.el = make(
      "div",
      { class: "ddpb-timeline", role: "group", "aria-label": "Collectives" },
      make(
        "div",
        { class: "ddpb-bar" },
        make("b", {}, "Collectives"),
        this.pause,
        this.button("−", () => this.zoom(1.6), "Zoom out"),
        this.button("+", () => this.zoom(1 / 1.6), "Zoom in"),
        this.button("Run", () => this.fit(), "Show the whole run"),
        this.slider,
        this.info,
      ),
      make("div", { class: "ddpb-lanes" }, rows, make("div", { class: "ddpb-canvas" }, this.canvas, this.frameAt, this.tip)),
      make("div", { class: "ddpb-legend" }, legend.map(([name, text]) => make("span", {}, make("i", { class: `ddpb-key-${name}`, "aria-hidden": "true" }), text))),
    );
  }

  button(text, act, label = null) {
    return small({ "aria-label": label, title: label, onclick: act }, text);
  }

  /** Have it drawn in the page's next frame. */
  touch() {
    this.asked ??= requestAnimationFrame(() => {
      this.asked = null;
      this.page.guarded(() => this.frame());
    });
  }

  zoom(factor, at) {
    this.window.zoom(factor, at);
    this.touch();
  }

  fit() {
    this.window.fit(this.page.store, this.page.now());
    this.touch();
  }

  hold() {
    this.window.follow = false;
    this.touch();
  }

  goLive() {
    this.window.follow = true;
    this.window.set = false;
    this.slider.value = 1000;
    this.page.past = null;
    this.page.draw();
  }

  /** The time that is looked at in words, for who cannot see the slider. */
  tellTime() {
    const { past } = this.page;
    const end = this.page.get("board").now ?? 0;
    const text = past ? `${formatSpan(Math.max(0, end - past.now))} ago` : this.page.get("board").frozen ? "the end" : "now";
    if (this.slider.getAttribute("aria-valuetext") !== text) this.slider.setAttribute("aria-valuetext", text);
  }

  /** Scrub back: the window goes there, and the rows show what was known then. */
  scrub() {
    const { store } = this.page;
    const { now: end = store.last, began = store.first } = this.page.get("board");
    const at = began + (Number(this.slider.value) / 1000) * (Math.max(end, store.last) - began);
    this.window.centre(at);
    this.touch();
    clearTimeout(this.asking);
    this.asking = setTimeout(() => this.page.send({ kind: "at", at: Math.round(at) }), 120);
  }

  // -- pointing

  wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
    event.preventDefault();
    this.zoom(Math.exp(event.deltaY / 300), this.shareOf(event));
  }

  grab(event) {
    this.grabbed = { x: event.clientX, from: this.window.from };
    this.canvas.setPointerCapture(event.pointerId);
  }

  shareOf(event) {
    const box = this.canvas.getBoundingClientRect();
    return Math.min(1, Math.max(0, (event.clientX - box.left - this.gutter) / (box.width - this.gutter)));
  }

  move(event) {
    if (this.grabbed) {
      const { x, from } = this.grabbed;
      if (Math.abs(x - event.clientX) <= 2) return;
      this.window.pan((from - this.window.from) / this.window.span + (x - event.clientX) / (this.width - this.gutter));
      this.touch();
      return;
    }
    const box = this.canvas.getBoundingClientRect();
    this.point(this.find(event.clientX - box.left, event.clientY - box.top));
  }

  /** The slice at a point of the canvas, or next to it. */
  find(x, y) {
    let [nearest, near] = [null, 3];
    const rank = Math.floor(y / this.rowHeight);
    this.layOut(this.shown[this.lineOf(rank)] ?? rank, (slice, x0, x1, top, tall) => {
      const off = Math.max(x0 - x, x - x1, top - y, y - top - tall, 0);
      if (off <= near) [nearest, near] = [slice, off];
    });
    return nearest;
  }

  /** A frame around what is pointed at, and words below it: the canvas stays as it is. */
  point(slice) {
    if (slice === this.at) return;
    this.at = slice;
    this.tip.hidden = !slice;
    if (slice) this.tip.replaceChildren(...this.page.store.describe(slice, this.page.now()).map((line) => make("div", {}, line)));
    this.drawPointed();
  }

  drawPointed() {
    const slice = this.at;
    const until = slice && endOf(slice, this.now);
    this.frameAt.hidden = !slice || until < this.window.from || calledAt(slice) > this.window.to;
    if (!slice) return;
    let [above, tall] = this.rowOf(slice[RANK]);
    this.layOut(slice[RANK], (each, _, __, top, high) => each === slice && ([above, tall] = [top, high]));
    const inside = (x) => Math.max(this.gutter, Math.min(x, this.width));
    const [x0, x1] = [inside(this.x(calledAt(slice))), inside(this.x(until))];
    this.frameAt.style.cssText = `left: ${x0}px; top: ${above}px; width: ${Math.max(x1 - x0, 3)}px; height: ${Math.max(tall, 3)}px`;
    this.tip.style.cssText = `left: ${Math.max(0, Math.min(x0, this.width - 320))}px; top: ${(slice[RANK] + 1) * this.rowHeight + 4}px`;
  }

  key(event) {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const { store } = this.page;
    if (steps[event.key]) {
      const [down, along] = steps[event.key];
      const rank = this.at ? this.at[RANK] + down : 0;
      const list = store.rows.get(rank)?.list;
      if (list?.length) {
        const here = this.at ? (down ? store.startOf(list, this.at[ISSUED]) + 1 : list.indexOf(this.at) + along) : list.length - 1;
        const next = list[Math.max(0, Math.min(list.length - 1, here))];
        this.point(next);
        if (next[ISSUED] < this.window.from || next[ISSUED] > this.window.to) this.window.centre(next[ISSUED]);
      }
    } else if (event.key === "+" || event.key === "=") this.zoom(1 / 1.6);
    else if (event.key === "-") this.zoom(1.6);
    else if (event.key === "Home") this.fit();
    else if (event.key === "End") this.goLive();
    else if (event.key === "Escape") this.point(null);
    else return;
    event.preventDefault();
    event.stopPropagation();
    this.touch();
  }

  // -- drawing

  x(at) {
    return this.gutter + ((at - this.window.from) / this.window.span) * (this.width - this.gutter);
  }

  /** Where a rank is drawn: its top and its height. */
  rowOf(rank) {
    const apart = this.rowHeight === ROW_HEIGHT ? 3 : this.rowHeight > 5 ? 1 : 0;
    return [rank * this.rowHeight + apart, this.rowHeight - 2 * apart];
  }

  /** The first line of the screen's pixels that a rank is on. */
  lineOf(rank) {
    return Math.floor(rank * this.rowHeight * this.ratio);
  }

  /** Where a rank's visible slices are drawn: `place(slice, x0, x1, top, tall)`. */
  layOut(rank, place) {
    const [above, high] = this.rowOf(rank);
    const seen = this.page.store.seen(rank, this.window.from, this.window.to);
    layOut(seen, (at) => this.x(at), this.now, high >= 10, (slice, x0, x1, top, tall) => place(slice, x0, x1, above + top * high, tall * high));
  }

  /** Draw it, if it can be seen, and again while time alone changes it. */
  frame() {
    const { store, el } = this.page;
    if (!el.offsetParent) return; // hidden; a ResizeObserver reports when that changes
    const { frozen } = this.page.get("board");
    this.now = this.page.now();
    const flows = this.window.update(store, this.now);
    const run = store.runAt((this.window.from + this.window.to) / 2);
    this.earlier = this.window.follow && run < store.run;
    this.drawCanvas();
    // What was pointed at may have moved, or have been dropped.
    if (this.at && store.rows.get(this.at[RANK])?.at.get(this.at[NUMBER]) !== this.at) this.point(null);
    else this.drawPointed();
    this.tellTime();
    const text = this.window.follow ? "Pause" : frozen ? "▶ End" : "▶ Live";
    if (this.pause.textContent !== text) this.pause.textContent = text;
    const skipped = store.skipped ? ` · ${store.skipped.toLocaleString()} not shown` : "";
    const title = store.titles.get(run);
    this.info.textContent = store.rows.size ? `${this.earlier ? "earlier run: " : ""}${title ? `${title} · ` : ""}${formatSpan(this.window.span)}${skipped}` : "none yet";
    clearTimeout(this.later);
    if (flows && !frozen) this.later = setTimeout(() => this.touch(), 100);
  }

  /** The colours of the page's theme: for a brush, and in `words` as pixels have them. */
  theme(brush) {
    const style = getComputedStyle(this.el);
    const names = ["ink", "line", "bad", "warn", "busy", "ok", "paused", "idle", "a", "b", "c", "d", "paper"];
    const colours = Object.fromEntries(names.map((each) => [each, style.getPropertyValue(`--ddpb-${each}`).trim() || "gray"]));
    const key = Object.values(colours).join() + style.fontFamily;
    if (this.colours?.key === key) return this.colours;
    const pixel = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const word = (colour) => {
      pixel.fillStyle = colour;
      pixel.fillRect(0, 0, 1, 1);
      return new Uint32Array(pixel.getImageData(0, 0, 1, 1).data.buffer)[0];
    };
    // Lines too thin for a pattern have its mean colour.
    const words = { wait: word(`color-mix(in srgb, ${colours.warn} 55%, ${colours.paper})`) };
    for (const name of ["paused", "bad", "idle", "a", "b", "c", "d"]) words[name] = word(colours[name]);
    return (this.colours = { ...colours, key, words, wait: brush.createPattern(hatch(colours.warn), "repeat"), held: brush.createPattern(hatch(colours.paused, true), "repeat"), font: style.fontFamily });
  }

  drawCanvas() {
    const size = this.page.get("board").world_size;
    const ratio = (this.ratio = window.devicePixelRatio || 1);
    this.shown = [];
    const { inline } = this.page;
    this.rowHeight = inline ? ROW_HEIGHT : rowHeight(size);
    this.width = Math.max(120, this.canvas.parentElement.clientWidth);
    this.gutter = inline ? 0 : this.width < 500 ? 26 : 36;
    const bottom = Math.ceil(this.rowHeight * size);
    const [wide, high] = [Math.round(this.width * ratio), Math.round((bottom + 18) * ratio)];
    if (this.canvas.width !== wide || this.canvas.height !== high) {
      [this.canvas.width, this.canvas.height] = [wide, high];
      this.canvas.style.height = `${bottom + 18}px`;
    }
    const brush = this.canvas.getContext("2d");
    brush.setTransform(ratio, 0, 0, ratio, 0, 0);
    brush.clearRect(0, 0, this.width, bottom + 18);
    const colours = this.theme(brush);
    const rows = this.boardRows();
    brush.font = `11px ${colours.font}`;
    brush.save();
    brush.beginPath();
    brush.rect(this.gutter, 0, this.width - this.gutter, bottom);
    brush.clip();
    if (this.rowHeight > 2) this.drawRows(brush, colours, size);
    else this.drawLines(brush, colours, size, rows);
    this.drawMarks(brush, colours);
    this.drawPlayhead(brush, colours, bottom);
    brush.restore();
    if (this.page.store.rows.size) this.drawAxis(brush, colours, bottom);
    if (!inline) this.drawLabels(brush, colours, size, rows);
    else this.drawRules(brush, colours, size);
  }

  drawRows(brush, colours, size) {
    brush.strokeStyle = colours.paused;
    brush.setLineDash([3, 2]);
    const fill = (name, x0, x1, top, tall) => {
      if (name === "paused") {
        brush.fillStyle = colours.held;
        brush.fillRect(x0, top, x1 - x0, tall);
        return brush.strokeRect(x0 + 0.5, top + 0.5, x1 - x0 - 1, tall - 1);
      }
      if (name === "wait") {
        // On paper: a hatch over a colour is mud.
        brush.fillStyle = colours.paper;
        brush.fillRect(x0, top, x1 - x0, tall);
      }
      brush.fillStyle = colours[name];
      brush.fillRect(x0, top, x1 - x0, tall);
    };
    for (let rank = 0; rank < size; rank++) {
      const placed = [];
      this.layOut(rank, (slice, x0, x1, top, tall) => {
        const from = this.drawSlice(fill, slice, x0, x1, top, tall);
        const before = placed.findLast((each) => each.top === top);
        if (before) before.x1 = Math.min(before.x1, x0); // its words end where the next begins
        placed.push({ slice, from, x1, top, tall });
      });
      for (const { slice, from, x1, top, tall } of placed) this.drawWords(brush, colours, slice, from, x1, top, tall);
    }
    brush.setLineDash([]);
  }

  /** Lines between the rows of ranks. */
  drawRules(brush, colours, size) {
    brush.fillStyle = colours.line;
    for (let rank = 1; rank <= size; rank++) brush.fillRect(0, rank * this.rowHeight - 1, this.width, 1);
  }

  /** The time that is looked at, where it is not now. */
  drawPlayhead(brush, colours, bottom) {
    const { past } = this.page;
    if (!past) return;
    const x = Math.round(this.x(past.now));
    brush.fillStyle = colours.ink;
    brush.fillRect(x - 1, 0, 2, bottom);
    brush.fillRect(x - 4, 0, 8, 4);
  }

  /**
   * Ranks of about a pixel, written as pixels: much less work than rectangles for a thousand ranks.
   * Of ranks that share a line the one in the smallest row of the board is drawn: the exception.
   */
  drawLines(brush, colours, size, rows) {
    const { ratio } = this;
    const left = Math.round(this.gutter * ratio);
    const [wide, high] = [this.canvas.width - left, Math.ceil(size * this.rowHeight * ratio)];
    if (this.image?.width !== wide || this.image.height !== high) this.image = new ImageData(wide, high);
    const pixels = new Uint32Array(this.image.data.buffer).fill(0);
    let [line, end] = [-1, -1];
    const inside = (x) => Math.max(0, Math.min(Math.round(x * ratio) - left, wide));
    const fill = (name, x0, x1) => {
      const [from, to] = [inside(x0), inside(Math.max(x1, x0 + 1 / ratio))];
      for (let y = line; y < end; y++) pixels.fill(colours.words[name], y * wide + from, y * wide + to);
    };
    const countOf = (rank) => rows.get(rank)?.count ?? Infinity;
    for (let rank = 0, next = 0; rank < size; rank = next) {
      line = this.lineOf(rank);
      let rarest = rank;
      while (++next < size && this.lineOf(next) === line) if (countOf(next) < countOf(rarest)) rarest = next;
      end = Math.max(line + 1, this.lineOf(next));
      this.shown[line] = rarest;
      this.layOut(rarest, (slice, x0, x1) => this.drawSlice(fill, slice, x0, x1));
    }
    brush.putImageData(this.image, left, 0);
  }

  /** Below what is there. */
  drawAxis(brush, colours, bottom) {
    brush.globalCompositeOperation = "destination-over";
    brush.textBaseline = "alphabetic";
    brush.textAlign = "center";
    const { store } = this.page;
    const origin = store.begun.get(store.runAt((this.window.from + this.window.to) / 2)) ?? 0;
    const times = ticks(this.window.from - origin, this.window.to - origin, this.width < 500 ? 3 : 6);
    for (const at of times) {
      const x = Math.round(this.x(at + origin)) + 0.5;
      if (x < this.gutter || at < 0) continue;
      brush.fillStyle = colours.line;
      brush.fillRect(x, 0, 1, bottom + 3);
      brush.fillStyle = colours.ink;
      const text = formatTick(at, times[1] - times[0] || at);
      if (x > this.gutter + 18 && x < this.width - 18) brush.fillText(text, x, bottom + 14);
    }
    brush.globalCompositeOperation = "source-over";
  }

  /** The board's row of each rank. */
  boardRows() {
    const { rows } = this.page.board;
    if (this.byRank?.rows !== rows) {
      const pairs = rows.flatMap((row) => parseRanks(row.ranks).map((rank) => [rank, row]));
      this.byRank = { rows, of: new Map(pairs) };
    }
    return this.byRank.of;
  }

  drawLabels(brush, colours, size, rows) {
    const step = 2 ** Math.ceil(Math.log2(Math.max(1, 11 / this.rowHeight)));
    brush.textAlign = "right";
    brush.textBaseline = "middle";
    const middle = (rank) => rank * this.rowHeight + Math.max(this.rowHeight, 10) / 2;
    const apart = this.rowHeight > 2 ? 1 : 0; // thinner ranks of a row make one bar
    let began = 0;
    for (let rank = 1; rank <= size; rank++) {
      const row = rows.get(began);
      if (!apart && rank < size && rows.get(rank) === row) continue;
      brush.fillStyle = colours[row && this.page.look(row).tone] ?? colours.idle;
      brush.fillRect(this.gutter - 5, began * this.rowHeight, 3, Math.max((rank - began) * this.rowHeight - apart, 0.6));
      began = rank;
    }
    brush.fillStyle = colours.ink;
    for (let rank = 0; rank < size; rank += step) brush.fillText(String(rank), this.gutter - 8, middle(rank));
    if (step === 1) return;
    // Where there is no room for all numbers, those of ranks in trouble stand above the others.
    const troubled = [...rows.keys()].filter((rank) => ["culprit", "late", "dead", "failed"].includes(rows.get(rank).role));
    for (const rank of troubled.slice(0, 12)) {
      brush.fillStyle = colours[this.page.look(rows.get(rank)).tone];
      brush.fillRect(0, middle(rank) - 7, this.gutter - 5, 14);
      brush.fillStyle = colours.paper;
      brush.fillText(String(rank), this.gutter - 8, middle(rank));
    }
  }

  /** A slice, by `paint(colour's name, x0, x1, top, tall)`; where its last part begins. */
  drawSlice(paint, slice, x0, x1, top, tall) {
    // Until a new run has its first collective, those of the run before it are grey.
    const fill = (name, ...where) => paint(this.earlier ? "idle" : name, ...where);
    const phase = PHASES[slice[PHASE]];
    const kind = this.page.store.kinds[slice[KIND]];
    const collective = slice[COLLECTIVE];
    let from = x0;
    if (slice[HELD]) {
      from = x0 = Math.min(x1, this.x(slice[ISSUED]));
      fill("paused", this.x(calledAt(slice)), x0, top, tall);
    }
    if (phase === "paused") fill("paused", x0, x1, top, tall);
    else if (phase === "issued") fill("wait", x0, x1, top, tall);
    else if (phase === "done") {
      if (this.x(collective?.last) > x0 + 1) from = Math.min(this.x(collective.last), x1);
      if (from > x0) fill("wait", x0, from, top, tall);
      fill(TONES[kind?.[OPERATION]] ?? "d", from, Math.max(x1, from + 1.5), top, tall);
    } else if (phase === "freed") fill("idle", x0, Math.max(x1, x0 + 3), top + tall / 3, tall / 3);
    else fill("bad", x0, Math.max(x1, x0 + LEAST_BAD), top, tall);
    return from;
  }

  /** Arrow heads at the last to arrive: on top, so that one rank of a thousand is seen. */
  drawMarks(brush, colours) {
    for (const { over, first, last, lastRank } of this.page.store.collectives.values()) {
      if (this.earlier || !over || last < this.window.from || last > this.window.to || last - first < 0.02 * this.window.span) continue;
      const [x, y] = [this.x(last), (lastRank + 0.5) * this.rowHeight];
      brush.beginPath();
      brush.moveTo(x, y);
      brush.lineTo(x - 8, y - 5);
      brush.lineTo(x - 8, y + 5);
      brush.closePath();
      brush.fillStyle = colours.bad;
      brush.fill();
      brush.strokeStyle = colours.paper;
      brush.stroke();
    }
  }

  drawWords(brush, colours, slice, x0, x1, top, tall) {
    const [left, right] = [Math.max(x0, this.gutter), Math.min(x1, this.width)];
    const kind = this.page.store.kinds[slice[KIND]];
    if (!kind || tall < 10 || right - left < 40) return;
    const phase = PHASES[slice[PHASE]];
    const text = ({ paused: "‖ ", issued: "… ", done: "", freed: "■ " }[phase] ?? "✗ ") + kind[OPERATION];
    brush.textAlign = "left";
    brush.textBaseline = "middle";
    const room = right - left - 8;
    const fitting = (each) => brush.measureText(each).width <= room;
    const fits = [`${text} bucket ${kind[BUCKET]}`, text].slice(kind[BUCKET] ? 0 : 1).find(fitting) ?? cutTo(text, fitting);
    if (!fits) return;
    const bare = isOpen(slice) || ["freed", "paused"].includes(phase);
    if (bare) {
      brush.fillStyle = colours.paper;
      brush.fillRect(left + 2, top + 2, brush.measureText(fits).width + 5, tall - 4);
    }
    const bad = ["failed", "refused"].includes(phase);
    brush.fillStyle = bare ? colours.ink : bad ? colours.paper : "#fff";
    brush.fillText(fits, left + 4, top + tall / 2 + 0.5);
  }
}
