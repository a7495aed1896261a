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
const HELP = "Drag: sums of a part; Enter: of all shown. Ctrl+wheel, W, S: zoom. Shift+wheel, A, D: move. Arrows: the next. Home: the run. End: now. Steps are backward passes, from 0.";
const TONES = { all_reduce: "a", broadcast: "b", barrier: "c" };

const path = (brush, points, x0 = 0, y0 = 0) => {
  brush.beginPath();
  for (const [x, y] of points) brush.lineTo(x + x0, y + y0);
};

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
      "aria-label": `Timeline of collectives. ${HELP}`,
      onpointermove: (e) => this.move(e),
      onpointerleave: () => this.selected || this.point(null),
      onpointerdown: (e) => this.grab(e),
      onlostpointercapture: () => (this.grabbed = null), // released, or taken over by a scroll
      ondblclick: () => this.fit(),
      onkeydown: (e) => this.key(e),
    });
    this.canvas.addEventListener("wheel", (e) => this.wheel(e), { passive: false });
    this.tip = make("div", { class: "ddpb-tip", role: "status", hidden: true });
    this.frameAt = make("div", { class: "ddpb-at", hidden: true });
    this.life = make("div", { class: "ddpb-life" });
    this.pause = this.button("Pause", () => (this.window.follow ? this.pan(0) : this.goLive()));
    this.slider = make("input", { type: "range", min: "0", max: "1000", value: "1000", "aria-label": "Time", "data-lm-suppress-shortcuts": "true", oninput: () => this.scrub() });
    this.info = make("span", { class: "ddpb-info" });
    const legend = [["a", "all_reduce"], ["b", "broadcast"], ["c", "barrier"], ["d", "other"], ["wait", "waits"], ["last", "last to arrive"], ["fail", "failed"], ["part", "parted"], ["pause", "paused"], ["free", "freed"], ["at", "time shown"]];
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
      make("div", { class: "ddpb-lanes" }, rows, make("div", { class: "ddpb-canvas" }, this.canvas, this.frameAt, this.tip), this.life),
      make("div", { class: "ddpb-legend" }, legend.map(([name, text]) => make("span", {}, make("i", { class: `ddpb-key-${name}`, "aria-hidden": "true" }), text)), make("p", {}, HELP)),
    );
  }

  /** Open or close what says the keys and marks. */
  help() {
    const notes = this.page.el.querySelector(".ddpb-notes");
    notes.open = !notes.open;
    if (notes.open) notes.firstChild.focus();
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
    this.window.centre(store.axis(at));
    this.touch();
    clearTimeout(this.asking);
    this.asking = setTimeout(() => this.page.send({ kind: "at", at: Math.round(at) }), 120);
  }

  // -- pointing

  wheel(event) {
    const aside = event.deltaX || (event.shiftKey && event.deltaY);
    if (!event.ctrlKey && !event.metaKey && !aside) return; // the page scrolls
    event.preventDefault();
    if (aside) this.pan(aside / 600);
    else this.zoom(Math.exp(event.deltaY / 300), this.shareOf(event));
  }

  pan(share) {
    this.window.pan(share);
    this.touch();
  }

  grab(event) {
    this.select(null);
    this.grabbed = event;
    this.canvas.setPointerCapture(event.pointerId);
  }

  shareOf(event) {
    const box = this.canvas.getBoundingClientRect();
    return Math.min(1, Math.max(0, (event.clientX - box.left - this.gutter) / (box.width - this.gutter)));
  }

  move(event) {
    const box = this.canvas.getBoundingClientRect();
    const rankAt = ({ clientY }) => Math.max(0, Math.min(Math.floor((clientY - box.top) / this.rowHeight), this.page.get("board").world_size - 1));
    if (this.grabbed) {
      if (Math.abs(this.grabbed.clientX - event.clientX) <= 2) return;
      const both = [this.grabbed, event];
      const places = both.map((each) => this.window.from + this.shareOf(each) * this.window.span);
      const ranks = both.map(rankAt);
      this.select({ from: Math.min(...places), to: Math.max(...places), first: Math.min(...ranks), last: Math.max(...ranks) });
    } else if (!this.selected) this.point(this.find(event.clientX - box.left, event.clientY - box.top));
  }

  /** Sum up a part of the axis on ranks `first` to `last`; null for none. */
  select(part) {
    this.point(null);
    this.selected = part;
    this.drawPointed();
    this.tip.hidden = !part;
    if (!part) return;
    this.window.follow = false;
    const { store } = this.page;
    const [from, to] = [store.timeOf(part.from), store.timeOf(part.to)];
    const ranks = Array.from({ length: part.last - part.first + 1 }, (_, i) => part.first + i);
    const slices = ranks.flatMap((rank) => store.seen(rank, from, to).filter((each) => endOf(each, this.now) >= from));
    this.tell([`${nameRanks(formatRanks(ranks))} · ${formatSpan(part.to - part.from)}`, ...sums(slices, store, this.now)]);
  }

  tell(lines) {
    this.tip.replaceChildren(...lines.map((line) => make("div", {}, line)));
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
    if (slice) this.tell(this.page.store.describe(slice, this.page.now()));
    this.drawPointed();
  }

  drawPointed() {
    const [slice, part] = [this.at, this.selected];
    if (!slice && !part) return (this.frameAt.hidden = true);
    const [begin, end] = part ? [part.from, part.to].map((at) => this.place(at)) : [calledAt(slice), endOf(slice, this.now)].map((at) => this.x(at));
    this.frameAt.hidden = end < this.gutter || begin > this.width;
    const last = part ? part.last : slice[RANK];
    let [above, tall] = part ? [part.first * this.rowHeight, (last - part.first + 1) * this.rowHeight] : this.rowOf(last);
    if (slice) this.layOut(last, (each, _, __, top, high) => each === slice && ([above, tall] = [top, high]));
    const inside = (x) => Math.max(this.gutter, Math.min(x, this.width));
    const [x0, x1] = [inside(begin), inside(end)];
    this.frameAt.style.cssText = `left: ${x0}px; top: ${above}px; width: ${Math.max(x1 - x0, 3)}px; height: ${Math.max(tall, 3)}px`;
    this.tip.style.cssText = `left: ${Math.max(0, Math.min(x0, this.width - 320))}px; top: ${(last + 1) * this.rowHeight + 4}px`;
  }

  key(event) {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const { store } = this.page;
    const key = event.key.toLowerCase();
    if (steps[event.key]) {
      const [down, along] = steps[event.key];
      const rank = this.at ? this.at[RANK] + down : 0;
      const list = store.rows.get(rank)?.list;
      if (list?.length) {
        const here = this.at ? (down ? store.startOf(list, this.at[ISSUED]) + 1 : list.indexOf(this.at) + along) : list.length - 1;
        const next = list[Math.max(0, Math.min(list.length - 1, here))];
        this.select(null);
        this.point(next);
        if (this.x(next[ISSUED]) < this.gutter || this.x(next[ISSUED]) > this.width) this.window.centre(store.axis(next[ISSUED]));
      }
    } else if (event.ctrlKey || event.metaKey || event.altKey) return;
    else if ("+=w".includes(key)) this.zoom(1 / 1.6);
    else if ("-s".includes(key)) this.zoom(1.6);
    else if ("ad".includes(key)) this.pan(key === "a" ? -0.2 : 0.2);
    else if (key === "?") this.help();
    else if (key === "enter") this.select({ ...this.window, first: 0, last: this.page.get("board").world_size - 1 });
    else if (event.key === "Home") this.fit();
    else if (event.key === "End") this.goLive();
    else if (event.key === "Escape") this.select(null);
    else return;
    event.preventDefault();
    event.stopPropagation();
    this.touch();
  }

  // -- drawing

  x(at) {
    return this.place(this.page.store.axis(at));
  }

  /** Where a place of the axis is drawn. */
  place(at) {
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
    layOut(this.seen(rank), (at) => this.x(at), this.now, this.floors, (slice, x0, x1, top, tall) => place(slice, x0, x1, above + top * high, tall * high));
  }

  seen(rank) {
    const { store } = this.page;
    return store.seen(rank, store.timeOf(this.window.from), store.timeOf(this.window.to));
  }

  /** Draw it, if it can be seen, and again while time alone changes it. */
  frame() {
    const { store, el } = this.page;
    if (!el.offsetParent) return; // hidden; a ResizeObserver reports when that changes
    const { frozen } = this.page.get("board");
    this.now = this.page.now();
    const flows = this.window.update(store, this.now);
    const run = store.runAt(store.timeOf((this.window.from + this.window.to) / 2));
    this.earlier = this.window.follow && run < store.run;
    this.drawCanvas(run);
    this.drawLife();
    // What was pointed at may have moved, or have been dropped.
    if (this.selected) this.drawPointed();
    else if (this.at && store.rows.get(this.at[RANK])?.at.get(this.at[NUMBER]) !== this.at) this.point(null);
    else this.drawPointed();
    this.tellTime();
    const text = this.window.follow ? "Pause" : frozen ? "▶ End" : "▶ Live";
    if (this.pause.textContent !== text) this.pause.textContent = text;
    const skipped = store.skipped ? ` · ${store.skipped.toLocaleString()} not shown` : "";
    const title = store.titles.get(run);
    this.info.textContent = store.rows.size ? `${this.earlier ? "previous run: " : ""}${title ? `${title} · ` : ""}${formatSpan(this.window.span)}${skipped}` : "none yet";
    clearTimeout(this.later);
    if (flows && !frozen) this.later = setTimeout(() => this.touch(), 100);
  }

  /** The colours of the page's theme: for a brush, and in `words` as pixels have them. */
  theme(brush) {
    const style = getComputedStyle(this.el);
    const names = ["ink", "line", "bad", "warn", "busy", "ok", "paused", "idle", "a", "b", "c", "d", "paper", "on"];
    const hues = Object.fromEntries(names.map((each) => [each, style.getPropertyValue(`--ddpb-${each}`).trim() || "gray"]));
    const key = Object.values(hues).join() + style.fontFamily;
    if (this.hues?.key === key) return this.hues;
    const pixel = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const word = (colour) => {
      pixel.fillStyle = colour;
      pixel.fillRect(0, 0, 1, 1);
      return new Uint32Array(pixel.getImageData(0, 0, 1, 1).data.buffer)[0];
    };
    // Lines too thin for a pattern have its mean colour.
    const words = { wait: word(`color-mix(in srgb, ${hues.warn} 55%, ${hues.paper})`) };
    for (const name of ["paused", "bad", "line", "idle", "a", "b", "c", "d"]) words[name] = word(hues[name]);
    return (this.hues = { ...hues, key, words, wait: brush.createPattern(hatch(hues.warn), "repeat"), held: brush.createPattern(hatch(hues.paused, true), "repeat"), font: style.fontFamily });
  }

  drawCanvas(run) {
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
    const hues = this.theme(brush);
    const rows = this.boardRows();
    // Of one height on all ranks and at all times of a run: else it would seem to mean something.
    const roomForTwo = this.rowOf(0)[1] >= 10;
    this.doubled ??= new Set();
    if (roomForTwo && !this.doubled.has(run))
      for (let rank = 0; rank < size; rank++) if (overlap(this.seen(rank), this.now)) this.doubled.add(run);
    this.floors = roomForTwo && this.doubled.has(run) ? 2 : 1;
    brush.font = `11px ${hues.font}`;
    brush.save();
    brush.beginPath();
    brush.rect(this.gutter, 0, this.width - this.gutter, bottom);
    brush.clip();
    if (this.rowHeight > 2) this.drawRows(brush, hues, size);
    else this.drawLines(brush, hues, size, rows);
    this.drawMarks(brush, hues);
    if (this.rowHeight > 2) this.drawParted(brush, hues);
    this.drawPlayhead(brush, hues, bottom);
    brush.restore();
    if (this.page.store.rows.size) this.drawAxis(brush, hues, bottom, run);
    if (!inline) this.drawLabels(brush, hues, size, rows);
    else this.drawRules(brush, hues, size);
  }

  drawRows(brush, hues, size) {
    brush.strokeStyle = hues.paused;
    brush.setLineDash([3, 2]);
    const fill = (name, x0, x1, top, tall) => {
      if (name === "paused") {
        brush.fillStyle = hues.held;
        brush.fillRect(x0, top, x1 - x0, tall);
        return brush.strokeRect(x0 + 0.5, top + 0.5, x1 - x0 - 1, tall - 1);
      }
      if (name === "wait") {
        // On paper: a hatch over a colour is mud.
        brush.fillStyle = hues.paper;
        brush.fillRect(x0, top, x1 - x0, tall);
      }
      brush.fillStyle = hues[name];
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
      for (const { slice, from, x1, top, tall } of placed) this.drawWords(brush, hues, slice, from, x1, top, tall);
    }
    brush.setLineDash([]);
  }

  /** Lines between the rows of ranks. */
  drawRules(brush, hues, size) {
    brush.fillStyle = hues.line;
    for (let rank = 1; rank <= size; rank++) brush.fillRect(0, rank * this.rowHeight - 1, this.width, 1);
  }

  /** The time that is looked at, where it is not now. */
  drawPlayhead(brush, hues, bottom) {
    const { past } = this.page;
    if (!past) return;
    const x = Math.round(this.x(past.now));
    brush.fillStyle = hues.ink;
    brush.fillRect(x - 1, 0, 2, bottom);
    brush.fillRect(x - 4, 0, 8, 4);
  }

  /**
   * Ranks of about a pixel, written as pixels: much less work than rectangles for a thousand ranks.
   * Of ranks that share a line the one in the smallest row of the board is drawn: the exception.
   */
  drawLines(brush, hues, size, rows) {
    const { ratio } = this;
    const left = Math.round(this.gutter * ratio);
    const [wide, high] = [this.canvas.width - left, Math.ceil(size * this.rowHeight * ratio)];
    if (this.image?.width !== wide || this.image.height !== high) this.image = new ImageData(wide, high);
    const pixels = new Uint32Array(this.image.data.buffer).fill(0);
    let [line, end] = [-1, -1];
    const inside = (x) => Math.max(0, Math.min(Math.round(x * ratio) - left, wide));
    const fill = (name, x0, x1) => {
      const [from, to] = [inside(x0), inside(Math.max(x1, x0 + 1 / ratio))];
      for (let y = line; y < end; y++) pixels.fill(hues.words[name], y * wide + from, y * wide + to);
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

  /** Below what is there: steps where there are some, else times, and how long the pauses are that it leaves out. */
  drawAxis(brush, hues, bottom, run) {
    brush.textBaseline = "alphabetic";
    brush.textAlign = "center";
    const { store } = this.page;
    const { from, to } = this.window;
    const taken = [];
    const tick = (x, text, colour, line) => {
      const half = brush.measureText(text).width / 2;
      brush.fillStyle = hues.line;
      if (line && x > this.gutter) brush.fillRect(x, 0, 1, bottom + 3);
      if (x - half < this.gutter || x + half > this.width || taken.some(([at, wide]) => Math.abs(at - x) < half + wide + 8)) return;
      taken.push([x, half]);
      brush.fillStyle = colour;
      brush.fillText(text, x, bottom + 14);
    };
    this.drawCuts(brush, hues, bottom, tick);
    brush.globalCompositeOperation = "destination-over";
    const origin = store.axis(store.begun.get(run) ?? 0);
    const steps = store.steps(Math.min(...store.rows.keys()), from, to);
    const most = (this.width - this.gutter) / 50;
    const every = [1, 2, 5, 10, 20, 50, 100, 200, 500].find((each) => steps.length / each <= most) ?? 1000;
    const times = ticks(from - origin, to - origin, this.width < 500 ? 3 : 6);
    const marks = steps.length > 2
      ? steps.filter(([step]) => step % every === 0).map(([step, at]) => [at, `step ${step}`])
      : times.filter((at) => at >= 0).map((at) => [at + origin, formatTick(at, times[1] - times[0] || at)]);
    for (const [at, text] of marks) tick(Math.round(this.place(at)) + 0.5, text, hues.ink, true);
    brush.globalCompositeOperation = "source-over";
  }

  /** A zigzag for each pause that the axis leaves out, with its length; pauses at one place are one. */
  drawCuts(brush, hues, bottom, tick) {
    const places = [];
    for (const { from, to } of this.page.store.cuts) {
      const x = Math.round(this.x(from));
      const last = places.at(-1);
      if (last && x - last[0] < 12) last[1] += to - from;
      else if (x >= this.gutter && x <= this.width) places.push([x, to - from]);
    }
    for (const [x, length] of places) {
      brush.beginPath();
      for (let y = 0; y <= bottom; y += 4) brush.lineTo(x + (y % 8 ? 3 : -3), y);
      for ([brush.lineWidth, brush.strokeStyle] of [[5, hues.paper], [1, hues.paused]]) brush.stroke();
      tick(x, `‖ ${formatSpan(length)}`, hues.paused);
    }
  }

  /** Where ranks parted from the others, and a link between the collectives that should have met. */
  drawParted(brush, hues) {
    const { at = [], link = [] } = this.page.board.parted ?? {};
    const point = ([rank, when]) => [this.x(when), (rank + 0.5) * this.rowHeight];
    if (this.earlier) return;
    path(brush, link.map(point));
    brush.setLineDash([4, 3]);
    brush.strokeStyle = brush.fillStyle = hues.bad;
    brush.stroke();
    brush.setLineDash([]);
    for (const each of at) {
      path(brush, [[0, -7], [7, 0], [0, 7], [-7, 0]], ...point(each));
      brush.fill();
    }
  }

  /** What the ranks use: of all below the rows, of each in the words of its row. */
  drawLife() {
    const { all, of } = this.page.store.life ?? {};
    if (!all || this.life.title === all) return;
    this.life.textContent = this.life.title = all;
    this.page.board.rows.forEach(({ ranks, process }, i) => {
      const row = this.page.rows.children[i];
      if (row) row.title = [process, ...parseRanks(ranks).map((rank) => of[rank])].filter(Boolean).join("\n");
    });
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

  drawLabels(brush, hues, size, rows) {
    const step = 2 ** Math.ceil(Math.log2(Math.max(1, 11 / this.rowHeight)));
    brush.textAlign = "right";
    brush.textBaseline = "middle";
    const middle = (rank) => rank * this.rowHeight + Math.max(this.rowHeight, 10) / 2;
    const apart = this.rowHeight > 2 ? 1 : 0; // thinner ranks of a row make one bar
    let began = 0;
    for (let rank = 1; rank <= size; rank++) {
      const row = rows.get(began);
      if (!apart && rank < size && rows.get(rank) === row) continue;
      brush.fillStyle = hues[row && this.page.look(row).tone] ?? hues.idle;
      brush.fillRect(this.gutter - 5, began * this.rowHeight, 3, Math.max((rank - began) * this.rowHeight - apart, 0.6));
      began = rank;
    }
    brush.fillStyle = hues.ink;
    for (let rank = 0; rank < size; rank += step) brush.fillText(String(rank), this.gutter - 8, middle(rank));
    if (step === 1) return;
    // Where there is no room for all numbers, those of ranks in trouble stand above the others.
    const troubled = [...rows.keys()].filter((rank) => ["culprit", "late", "dead", "failed"].includes(rows.get(rank).role));
    for (const rank of troubled.slice(0, 12)) {
      brush.fillStyle = hues[this.page.look(rows.get(rank)).tone];
      brush.fillRect(0, middle(rank) - 7, this.gutter - 5, 14);
      brush.fillStyle = hues.paper;
      brush.fillText(String(rank), this.gutter - 8, middle(rank));
    }
  }

  /** A slice, by `paint(colour's name, x0, x1, top, tall)`; where its last part begins. */
  drawSlice(paint, slice, x0, x1, top, tall) {
    // Until a new run has its first collective, those of the run before it are grey.
    const fill = (name, ...where) => paint(this.earlier ? "line" : name, ...where);
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
  drawMarks(brush, hues) {
    for (const { over, first, last, lastRank } of this.page.store.collectives.values()) {
      const [x, y] = [this.x(last), (lastRank + 0.5) * this.rowHeight];
      if (this.earlier || !over || x < this.gutter || x > this.width || last - first < 0.02 * this.window.span) continue;
      path(brush, [[0, 0], [-8, -5], [-8, 5], [0, 0]], x, y);
      brush.fillStyle = hues.bad;
      brush.fill();
      brush.strokeStyle = hues.paper;
      brush.stroke();
    }
  }

  drawWords(brush, hues, slice, x0, x1, top, tall) {
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
      brush.fillStyle = hues.paper;
      brush.fillRect(left + 2, top + 2, brush.measureText(fits).width + 5, tall - 4);
    }
    const bad = ["failed", "refused"].includes(phase);
    brush.fillStyle = bare || this.earlier ? hues.ink : bad ? hues.paper : hues.on;
    brush.fillText(fits, left + 4, top + tall / 2 + 0.5);
  }
}
