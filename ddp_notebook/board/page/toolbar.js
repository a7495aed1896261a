// The toolbar: always the same buttons in the same places, and for which ranks they are.

const RANKS_IN_TOOLBAR = 8;

class Toolbar {
  constructor(page) {
    this.page = page;
    this.buttons = make("div", { class: "ddpb-actions", role: "toolbar", "aria-label": "What can be done" });
    this.ranks = make("div", { class: "ddpb-choose", role: "group", "aria-label": "Ranks for Continue, Step, Where and Restart" });
    this.types = make("code", { class: "ddpb-types", "aria-hidden": "true" });
    this.el = make("div", { class: "ddpb-toolbar" }, this.buttons, make("div", { class: "ddpb-for-whom" }, this.ranks, this.types));
  }

  draw(actions, busy) {
    const { chosen } = this.page;
    this.el.hidden = !actions.length;
    const focused = this.el.contains(document.activeElement) && document.activeElement.dataset.name;
    const shown = actions.filter(({ name }) => !ONLY_AT_LINES.includes(name));
    show(this.buttons, [shown, busy, [...chosen]], () => shown.map((action) => this.button(action, busy)));
    const size = this.page.board.world_size;
    show(this.ranks, [size, [...chosen]], () => [
      make("span", {}, "Ranks"),
      this.pick("all", !chosen.size, () => this.page.choose([])),
      size <= RANKS_IN_TOOLBAR
        ? [...Array(size).keys()].map((rank) => this.pick(rank, chosen.has(rank), () => this.page.toggle([rank]), `Choose rank ${rank}, here`))
        : chosen.size > 0 && make("span", {}, formatRanks(chosen)),
    ]);
    if (focused) this.el.querySelector(`[data-name="${focused}"]`)?.focus();
    this.tell();
  }

  /** Beside the ranks: the magic of the button that is pointed at, or has the focus. */
  tell() {
    this.types.textContent = this.buttons.querySelector(":is(:hover, :focus)")?.title ?? "";
  }

  button(action, busy) {
    const magic = magicFor(action, this.page.chosen);
    const enough = action.name === "restart" && this.page.chosen.size > 0 && action.why_not.startsWith("choose");
    const working = busy.includes(magic);
    const whyNot = working ? "running" : enough ? "" : action.why_not;
    const says = whyNot ? `${magic}: ${whyNot}` : magic;
    const tell = () => this.tell();
    return make(
      "button",
      {
        class: "ddpb-action",
        type: "button",
        "data-name": action.name,
        "aria-disabled": String(Boolean(whyNot)),
        "aria-label": `${action.label} ${magic}`,
        title: says,
        onmouseenter: tell,
        onmouseleave: tell,
        onfocus: tell,
        onblur: tell,
        onclick: () => whyNot || this.page.act(magic),
      },
      sign(working ? "…" : SIGNS[action.name]),
      action.label,
    );
  }

  pick(text, on, act, label = null) {
    return make("button", { class: "ddpb-pick", type: "button", "data-name": `pick-${text}`, "aria-pressed": String(on), "aria-label": label, onclick: act }, String(text));
  }
}

const SIGNS = { continue: "▶▶", step: "▸|", abort: "■", cancel: "■", restart: "↻", why: "?", where: "≡" };
